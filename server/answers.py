"""What the engine says, in OpenAI's shapes: chunks of a stream, and whole answers.

Receives deltas, gives bytes. Most chunks carry nothing but text, so their constant parts are encoded once a request.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from math import isfinite
from typing import Any, ClassVar, Final

import msgspec

from ..hooks.messages import Delta, TokenLogprobs, Usage

TokenText = Callable[[int], tuple[str, bytes]]
"""A token id → what to show for it, and its bytes."""

JSON = dict[str, Any]

# JSON has no infinity; OpenAI reports this for tokens that cannot be drawn.
LEAST_LOGPROB: Final = -9999.0

_encode: Final = msgspec.json.Encoder().encode


class Collected:
    """One choice of an answer that is not streamed, as far as it has come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish


class Format:
    """Common to both kinds of completions; one instance a request.

    Args:
        id, created, model, fingerprint: repeated in every chunk.
        token_text: for log-probabilities.
        logprobs: whether the client asked for them.
        include_usage: end the stream with a chunk of usage.
    """

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]
    _text_open: ClassVar[bytes]
    _text_shut: ClassVar[bytes]

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: str,
        fingerprint: str,
        token_text: TokenText,
        logprobs: bool = False,
        include_usage: bool = False,
    ) -> None:
        self._head = {"id": id, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._token_text = token_text
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._event = b"data: " + _encode({"object": self.chunk, **self._head})[:-1]
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._begun: dict[int, bytes] = {}

    def event(self, delta: Delta, timings: JSON | None = None) -> bytes:
        """One event of a stream, or nothing where the client would see nothing.

        Args:
            timings: given with the last delta.
        """
        begun = self._begun.get(delta.choice)
        if begun is not None and delta.finish is None and not delta.logprobs:
            return begun + _encode(delta.text) + self._text_shut + self._tail if delta.text else b""
        if begun is None and delta.finish is None and not delta.text and not delta.logprobs:
            return b""
        choice = {
            "index": delta.choice,
            **self._chunk_text(delta.text, first=begun is None),
            "logprobs": self._chunk_logprobs(delta),
            "finish_reason": delta.finish,
        }
        self._begun[delta.choice] = self._event + b',"choices":[{"index":%d,' % delta.choice + self._text_open
        # With a chunk of usage to come, that one is the last.
        more = b'],"timings":%b}\n\n' % _encode(timings) if timings and not self._include_usage else self._tail
        return self._event + b',"choices":[' + _encode(choice) + more

    def end(self, usage: Usage | None, timings: JSON) -> bytes:
        """What follows the last delta: usage where it was asked for, and the mark of a good end."""
        if usage is None or not self._include_usage:
            return b"data: [DONE]\n\n"
        rest = _encode({"choices": [], "usage": usage_object(usage), "timings": timings})
        return self._event + b"," + rest[1:] + b"\n\ndata: [DONE]\n\n"

    def answer(self, choices: list[Collected], usage: Usage, timings: JSON) -> bytes:
        """The whole answer of a request that is not streamed."""
        return _encode(
            {
                "object": self.whole,
                **self._head,
                "choices": [
                    {
                        "index": index,
                        **self._whole_text("".join(choice.texts)),
                        "logprobs": self._logprobs_object(choice.token_ids, choice.logprobs, index),
                        "finish_reason": choice.finish,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage_object(usage),
                "timings": timings,
            }
        )

    def _chunk_logprobs(self, delta: Delta) -> JSON | None:
        return self._logprobs_object(list(delta.token_ids), list(delta.logprobs), delta.choice)

    def _logprobs_object(self, ids: list[int], logprobs: list[TokenLogprobs], index: int) -> JSON | None:
        return self._listed(ids, logprobs, index) if self._logprobs else None

    def _chunk_text(self, text: str, *, first: bool) -> JSON:
        raise NotImplementedError

    def _whole_text(self, text: str) -> JSON:
        raise NotImplementedError

    def _listed(self, ids: list[int], logprobs: list[TokenLogprobs], index: int) -> JSON:
        raise NotImplementedError


class ChatFormat(Format):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    _text_open = b'"delta":{"content":'
    _text_shut = b'},"logprobs":null,"finish_reason":null}'

    def _chunk_text(self, text: str, *, first: bool) -> JSON:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"delta": delta}

    def _whole_text(self, text: str) -> JSON:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _listed(self, ids: list[int], logprobs: list[TokenLogprobs], index: int) -> JSON:
        def entry(id: int, logprob: float) -> JSON:
            text, data = self._token_text(id)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

        content = [
            {
                **entry(id, of.logprob),
                "top_logprobs": [entry(*top) for top in zip(of.top_ids, of.top_logprobs, strict=True)],
            }
            for id, of in zip(ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionFormat(Format):
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"
    _text_open = b'"text":'
    _text_shut = b',"logprobs":null,"finish_reason":null}'

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self._offsets: dict[int, _Offset] = {}

    def _chunk_text(self, text: str, *, first: bool) -> JSON:
        return {"text": text}

    def _whole_text(self, text: str) -> JSON:
        return {"text": text}

    def _listed(self, ids: list[int], logprobs: list[TokenLogprobs], index: int) -> JSON:
        offset = self._offsets.setdefault(index, _Offset())
        shown = [self._token_text(id) for id in ids]
        return {
            "tokens": [text for text, _ in shown],
            "token_logprobs": [_finite(of.logprob) for of in logprobs],
            "top_logprobs": [
                {
                    self._token_text(id)[0]: _finite(logprob)
                    for id, logprob in zip(of.top_ids, of.top_logprobs, strict=True)
                }
                for of in logprobs
            ],
            "text_offset": [offset.advance(data) for _, data in shown],
        }


class _Offset:
    """Where in the text of a choice each token begins, in characters; a token may hold a piece of one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def advance(self, data: bytes) -> int:
        start = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return start


def usage_object(usage: Usage) -> JSON:
    """Token counts of a request."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if isfinite(logprob) else LEAST_LOGPROB
