"""`/v1/ws`: several requests on one WebSocket, as docs/websocket.md describes them.

A socket has one task that receives and one that writes, and one task a live request between the engine and the writer.
The channel to the writer holds nothing: each request waits with at most one handful of frames until it is its turn, in
the order in which they came, so that no request waits for more than one handful of each other. The receiver waits for
nothing but the client; where it cannot put what it has to say, it closes the socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from ..hooks.errors import BadRequest, RequestError
from . import ws_messages as wire
from .errors import error_response
from .ws_answer import Make, Serving, answer, make_request

if TYPE_CHECKING:
    from ..core.engine import Engine

MAX_LIVE: Final = 8
"""Requests of a socket that have not ended."""
MAX_NOTES: Final = 64
"""Pongs and refusals that wait for the writer."""
MAX_BAD_MESSAGES: Final = 4
"""In a row; one more and the client is not speaking this protocol."""

GOING_AWAY: Final = 1001
TEXT_ONLY: Final = 1003
BAD_MESSAGE: Final = 4400
TOO_MANY: Final = 4429


class ForeignOrigin(BadRequest):
    """A page of another site must not use the server through its visitor's browser."""

    status = 403
    code = "foreign_origin"


class WebSockets:
    """An ASGI application for WebSockets only.

    Args:
        serving: says which model there is, or why there is none.
        origins: those that may connect besides the server's own; `*` for all.
    """

    def __init__(self, engine: Engine, serving: Serving, *, origins: Sequence[str] = ()) -> None:
        self._engine = engine
        self._serving = serving
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        try:
            self._check(scope)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        else:
            await send({"type": "websocket.accept", "subprotocol": wire.SUBPROTOCOL})
            make = partial(make_request, self._engine, self._serving, HTTPConnection(scope))
            await Session(self._engine, make, receive, send).run()

    def _check(self, scope: Scope) -> None:
        self._serving(None)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        # Browsers ask nobody before they open a WebSocket to another site; they only say whose page it was.
        own = origin is None or origin.partition("://")[2] == headers.get("host")
        if not own and not {origin, "*"} & set(self._origins):
            raise ForeignOrigin(f"origin must be the server's own or one of cors_origins, got {origin}: add it there")
        if wire.SUBPROTOCOL not in scope["subprotocols"]:
            offered = ", ".join(scope["subprotocols"]) or "none"
            raise BadRequest(f"subprotocol must be {wire.SUBPROTOCOL}, got {offered}: offer it in the handshake")


class Session:
    """One socket, from its acceptance to its close."""

    def __init__(self, engine: Engine, make: Make, receive: Receive, send: Send) -> None:
        self._engine = engine
        self._make = make
        self._receive = receive
        self._send = send
        self._live: dict[str, trio.CancelScope] = {}
        self._to_writer, self._from_requests = trio.open_memory_channel[list[str]](0)
        self._notes, self._from_receiver = trio.open_memory_channel[wire.Error | wire.Pong](MAX_NOTES)

    async def run(self) -> None:
        async with trio.open_nursery() as around:
            around.start_soon(self._write)
            with self._to_writer:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass_notes_on)
                    with self._notes:
                        close = await self._listen(nursery)
                    if close is None or close["code"] != GOING_AWAY:
                        nursery.cancel_scope.cancel()
        if close is not None:
            await self._send(close)

    async def _listen(self, nursery: trio.Nursery) -> Message | None:
        """Receive until the socket has to be closed. None: it has been."""
        num_bad = 0
        try:
            while (event := await self._receive())["type"] != "websocket.disconnect":
                text = event.get("text")
                if text is None:
                    return _close(TEXT_ONLY, "messages must be text frames")
                try:
                    self._hear(wire.decode(text), nursery)
                except BadRequest as error:
                    num_bad += 1
                    if num_bad > MAX_BAD_MESSAGES:
                        return _close(BAD_MESSAGE, f"{num_bad} bad messages in a row")
                    self._notes.send_nowait(wire.error_message(None, error))
                else:
                    num_bad = 0
        except trio.WouldBlock:
            return _close(TOO_MANY, "too many messages, and their answers are not read")
        # The server says so while it still can send; the engine has ended every request by then.
        return _close(GOING_AWAY, "the server is shutting down") if event.get("code") == GOING_AWAY else None

    def _hear(self, message: wire.Start | wire.Cancel | wire.Ping, nursery: trio.Nursery) -> None:
        match message:
            case wire.Start(id=id) if id in self._live:
                # Under that id it would read as the end of the request that has it.
                reason = f"id must not be that of a live request, got {id}: choose another"
                self._notes.send_nowait(wire.Error(id=None, code="duplicate_id", message=reason, param="id"))
            case wire.Start(id=id) if len(self._live) == MAX_LIVE:
                reason = f"a socket must have at most {MAX_LIVE} live requests: wait for one to end, or open another"
                self._notes.send_nowait(wire.Error(id=id, code="too_many_live", message=reason))
            case wire.Start(id=id):
                scope = self._live[id] = trio.CancelScope()
                nursery.start_soon(self._serve, message, scope)
            case wire.Cancel(id=id):
                if id in self._live:
                    self._live[id].cancel()
            case wire.Ping(t=t):
                self._notes.send_nowait(wire.Pong(t=t))

    async def _serve(self, start: wire.Start, scope: trio.CancelScope) -> None:
        """Run one request and end it once, whatever happens to it."""
        ending: wire.Done | wire.Error = wire.Error(id=start.id, code="cancelled", message="cancelled by the client")
        with scope:
            ending = await answer(self._engine, self._make, start, self._to_writer.send)
        await self._to_writer.send([wire.encode(ending)])
        # Only now: a client that reads nothing must not be able to pile up endings.
        del self._live[start.id]

    async def _pass_notes_on(self) -> None:
        async for note in self._from_receiver:
            frames = [wire.encode(note)]
            while self._from_receiver.statistics().current_buffer_used:
                frames.append(wire.encode(self._from_receiver.receive_nowait()))
            await self._to_writer.send(frames)

    async def _write(self) -> None:
        async for frames in self._from_requests:
            for frame in frames:
                await self._send({"type": "websocket.send", "text": frame})


def _close(code: int, reason: str) -> Message:
    return {"type": "websocket.close", "code": code, "reason": reason}
