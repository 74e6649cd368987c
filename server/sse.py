"""An answer as a stream of server-sent events.

No generator stands between the engine and the socket: a blocked write means that no delta is taken, so the request's
mailbox fills and parks the request. An error before the first delta is an ordinary HTTP error; one after it is an
event, followed by the end of the body without `[DONE]`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio
from starlette.types import Receive, Scope, Send

from ..hooks.errors import RequestError, RequestFailed
from ..hooks.messages import Delta, Request, Usage
from .answers import Format
from .errors import error_object
from .exchange import CUT_SHORT, Ending, Start, exchange

if TYPE_CHECKING:
    from ..core.engine import Engine

MAX_WRITE_BYTES: Final = 16384

HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class TokenStream:
    """An ASGI application that streams the answer to one request.

    Args:
        ping_s: seconds without an event after which a comment is sent, so that nobody on the way takes the connection
            for dead; also how long the status waits for the first delta, which may bring an error.
    """

    def __init__(self, engine: Engine, start: Start, format: Format, *, ping_s: float) -> None:
        self._engine = engine
        self._start = start
        self._format = format
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(request: Request) -> Ending:
            return await self._answer(request, send)

        await exchange(self._engine, self._start, receive, answer)

    async def _answer(self, request: Request, send: Send) -> Ending:
        await self._engine.submit(request)
        first: Delta | None = None
        with trio.move_on_after(self._ping_s) as waiting:
            first = await self._engine.receive(request)
        if first is not None and first.error is not None:
            raise first.error
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        events = Events(self._engine, request, self._format)
        out = events.encode(first) if first is not None else b""

        async def write_all() -> None:
            nonlocal out
            while not events.ended:
                if out:
                    await writer.write(out)
                out = await events.next()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            writer = Writer(send, self._ping_s, start_at_once=waiting.cancelled_caught)
            nursery.start_soon(writer.ping)
            # A task of its own: to wake one goes through every call on its way down, and there are two dozen to here.
            nursery.start_soon(write_all)
        return Ending(partial(send, {"type": "http.response.body", "body": out, "more_body": False}), events.error)


class Writer:
    """Writes events, and comments where there are none for a while."""

    def __init__(self, send: Send, ping_s: float, *, start_at_once: bool) -> None:
        self._send = send
        self._ping_s = ping_s
        self._last = -float("inf") if start_at_once else trio.current_time()

    async def write(self, out: bytes) -> None:
        await self._send({"type": "http.response.body", "body": out, "more_body": True})
        self._last = trio.current_time()

    async def ping(self) -> None:
        """Run beside the writes. A timer of its own costs nothing a token; a deadline around each wait would."""
        while True:
            if trio.current_time() >= self._last + self._ping_s:
                await self.write(b": ping\n\n")
            await trio.sleep_until(self._last + self._ping_s)


class Events:
    """Takes a request's deltas and encodes as many as fit into one write.

    Attributes:
        usage: set with the last delta.
        ended: what was returned last is the end of the body.
        error: what the request ended with, where it did not end well.

    Args:
        alone: nothing follows this request in the body, so the mark of its end does.
    """

    def __init__(self, engine: Engine, request: Request, format: Format, *, alone: bool = True) -> None:
        self._engine = engine
        self._request = request
        self._format = format
        self._alone = alone
        self._num_unfinished = request.params.n
        self._begun = False
        self.usage: Usage | None = None
        self.ended = False
        self.error: RequestError | None = None

    async def next(self) -> bytes:
        """The events that are there, after waiting for one; b"" where the client would see nothing of them."""
        out = self.encode(await self._engine.receive(self._request))
        while not self.ended and len(out) < MAX_WRITE_BYTES:
            delta = self._engine.receive_nowait(self._request)
            if delta is None:
                break
            out += self.encode(delta)
        return out

    def encode(self, delta: Delta | None) -> bytes:
        """The events of one delta; with the last one, also what ends the stream."""
        if delta is None:
            return self._fail(RequestFailed(CUT_SHORT))
        if delta.error is not None:
            return self._fail(delta.error)
        if not self._begun:
            self._begun = True
            self._format.begin(self._request)
        self.usage = delta.usage or self.usage
        if delta.finish is not None:
            self._num_unfinished -= 1
        if self._num_unfinished > 0:
            return self._format.event(delta)
        self.ended = True
        timings = self._engine.timings(self._request)
        last = self._format.event(delta, timings)
        return last + self._format.end(self.usage, timings) if self._alone else last

    def _fail(self, error: RequestError) -> bytes:
        self.ended = True
        self.error = error
        return error_event(error)


def error_event(error: RequestError) -> bytes:
    """What the client of a stream that has begun is told."""
    return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n"
