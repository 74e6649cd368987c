"""What came back for one request: a stream of events read as they come, each stamped with its time.

Knows the chunks of chat and text completions. An event is one `data:` line, as all servers of this API have it; it is
decoded once, into the few fields that count here.
"""

from __future__ import annotations

import time
from array import array
from typing import Final

import msgspec
from msgspec import Struct

from .framing import WireError

MAX_BODY_BYTES: Final = 65536
"""Kept of a body that is no stream, to quote from it."""
MAX_EVENT_BYTES: Final = 1 << 24
MAX_QUOTE: Final = 300


class Details(Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class Usage(Struct, frozen=True, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Delta(Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(Struct, frozen=True, gc=False):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        )


class Failure(Struct, frozen=True, gc=False):
    message: str | None = None


class Event(Struct, frozen=True, gc=False):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Failure | str | None = None


_decode: Final = msgspec.json.Decoder(Event).decode


class Answer:
    """A `wire.Sink` for one streamed response.

    Attributes:
        times: `time.perf_counter()` of each event that brought text, in seconds.
        num_events: events of any kind.
        usage: as the server told last; None: it never did.
        finish: why the answer ended.
        error: the kind of what went wrong, and *message* what the server or the system said of it.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.num_events = 0
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.error: str | None = None
        self.message = ""
        self._status = 0
        self._is_stream = False
        self._done = False
        self._rest = b""

    def head(self, status: int, content_type: str) -> None:
        self._status = status
        self._is_stream = status == 200 and content_type.partition(";")[0].strip() in ("text/event-stream", "")

    def body(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._is_stream:
            self._rest += data[: MAX_BODY_BYTES - len(self._rest)]
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise WireError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        self.num_events += 1
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            raise WireError(f"an event is no chunk of an answer ({error}): {_quote(data)}") from None
        if event.error is not None:
            self.fail("error event", _message(event.error) or _quote(data))
        if event.usage is not None:
            self.usage = event.usage
        choices = event.choices or ()
        if any(choice.says_something for choice in choices):
            self.times.append(now)
        for choice in choices:
            self.finish = choice.finish_reason or self.finish

    def fail(self, kind: str, message: str) -> None:
        """Something went wrong. Only the first counts."""
        if self.error is None:
            self.error, self.message = kind, message

    def end(self) -> None:
        """The response is complete: judge whether the answer is."""
        if self._status != 200:
            self.fail(f"http {self._status}", self._told())
        elif not self._is_stream:
            self.fail("not a stream", self._told())
        elif not self._done and self.finish is None:
            self.fail("cut short", "the stream ended without a finish_reason and without [DONE]")
        elif not self.times:
            self.fail("empty", "the answer has no text")

    def _told(self) -> str:
        """What a body that is no stream says."""
        try:
            return _message(_decode(self._rest).error) or _quote(self._rest)
        except msgspec.MsgspecError:
            return _quote(self._rest)


def _message(failure: Failure | str | None) -> str | None:
    return failure.message if isinstance(failure, Failure) else failure


def _quote(data: bytes) -> str:
    return data[:MAX_QUOTE].decode("utf-8", "replace")
