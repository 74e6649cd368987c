"""Hypercorn's WebSockets, made safe: what `hardening` puts in the place of its classes.

The originals go on buffering a message that is too large, leave refused connections open and their application
waiting, inflate whatever is sent compressed, work through a flood of tiny frames in one go, and never look whether
their pings are answered.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import trio
from hypercorn.protocol.events import Event, Request, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, FrameTooLargeError, Handshake, WSStream
from wsproto.events import CloseConnection, Message, Ping
from wsproto.frame_protocol import CloseReason

PING_S: Final = 20.0
"""Seconds of silence after which a client is pinged; as long again, and it is given up."""


class PlainHandshake(Handshake):
    """Accepts no compression, which would be done on the event loop, its limits checked after inflating."""

    def __init__(self, headers: list[tuple[bytes, bytes]], http_version: str) -> None:
        super().__init__(headers, http_version)
        self.extensions = None

    def is_valid(self) -> bool:
        return super().is_valid() and _is_key(self.key)


class SafeWSStream(WSStream):
    """One WebSocket, whose client's mistakes end it and nothing else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = trio.CancelScope()
        self._heard = False

    async def handle(self, event: Event) -> None:
        self._heard = True
        if isinstance(event, StreamClosed):
            self._open.cancel()
        elif not isinstance(event, Request) and self.state in _REFUSED:
            return  # Nothing of what follows a refusal is wanted.
        was_closed = self.closed
        await super().handle(event)
        if not was_closed and self._failed_early(event):
            # Answered with an error. An application that runs already must hear of it, and nothing can follow.
            await self._tell_app(CloseReason.ABNORMAL_CLOSURE)
            await self.send(StreamClosed(stream_id=self.stream_id))

    def _failed_early(self, event: Event) -> bool:
        return self.closed and self.state is ASGIWebsocketState.HANDSHAKE and not isinstance(event, StreamClosed)

    async def _handle_events(self) -> None:
        for event in self.connection.events():
            # A flood of tiny frames gets its turn among others, frame by frame.
            await trio.lowlevel.checkpoint()
            if self.closed:
                return
            match event:
                case Message():
                    try:
                        self.buffer.extend(event)
                    except FrameTooLargeError:
                        return await self._end(CloseConnection(code=CloseReason.MESSAGE_TOO_BIG))
                    if event.message_finished:
                        message = self.buffer.to_message()
                        self.buffer.clear()
                        assert self.app_put is not None
                        await self.app_put(message)
                case Ping():
                    await self._send_wsproto_event(event.response())
                case CloseConnection():
                    # The client's own, or what wsproto makes of a frame that breaks the protocol.
                    return await self._end(event.response())

    async def _end(self, close: CloseConnection) -> None:
        await self._send_wsproto_event(close)
        await self.send(StreamClosed(stream_id=self.stream_id))

    async def _send_pings(self) -> None:
        """Run beside an accepted connection."""
        silent = False
        with self._open:
            silent = await self._watch(self.config.websocket_ping_interval or PING_S)
        if silent:
            await self.send(StreamClosed(stream_id=self.stream_id))

    async def _watch(self, interval_s: float) -> bool:
        """Whether the client has left a ping unanswered. False: the server shuts down, and the application knows."""
        pinged = False
        while True:
            self._heard = False
            with trio.move_on_after(interval_s):
                await self.context.terminated.wait()
                await self._tell_app(CloseReason.GOING_AWAY)
                return False
            if self._heard:
                pinged = False
            elif pinged:
                return True
            else:
                await self._send_wsproto_event(Ping())
                pinged = True

    async def _tell_app(self, code: int) -> None:
        if self.app_put is not None:
            await self.app_put({"type": "websocket.disconnect", "code": int(code), "reason": ""})


_REFUSED: Final = (ASGIWebsocketState.RESPONSE, ASGIWebsocketState.HTTPCLOSED)


def _is_key(key: bytes | None) -> bool:
    """Whether it is sixteen bytes in base64, as RFC 6455, section 4.1, has it."""
    try:
        return key is not None and len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        return False
