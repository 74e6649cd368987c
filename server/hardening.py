"""Hypercorn on Trio, made safe against single connections.

Hypercorn's Trio worker lets one connection's protocol error end the whole server, and waits without a bound for clients
that do not read. This module gives each of its classes at fault a subclass and puts it in the place of the original;
two more (`Quick…`) spare a token most of its way to the socket. It knows nothing of HTTP routes or of the engine;
nothing else in the project reaches into Hypercorn.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from math import inf
from typing import Any, Final

import h2.errors
import h2.events
import h2.exceptions
import h11
import hypercorn.config
import hypercorn.protocol
import hypercorn.protocol.h2
import hypercorn.protocol.h11
import hypercorn.protocol.http_stream
import hypercorn.protocol.ws_stream
import hypercorn.trio.run
import hypercorn.trio.tcp_server
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, Data, EndBody, EndData, Response, Trailers
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.http_stream import ASGIHTTPState
from hypercorn.trio.task_group import TaskGroup, _handle
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from hypercorn.utils import suppress_body

from ..hooks.errors import StartError
from .ws_hardening import PING_S, PlainHandshake, SafeWSStream

HYPERCORN: Final = "0.18.0"
READ_BYTES: Final = 64 * 1024


class WriteLimit:
    """How long one write to a client may take before its connection is given up.

    Args:
        timeout_s: for each write; a client that takes a little within this time lives on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._cutoff = inf
        self._scopes: set[trio.CancelScope] = set()

    @contextmanager
    def scope(self, *, shield: bool = False) -> Iterator[trio.CancelScope]:
        """A cancel scope for one write."""
        deadline = min(trio.current_time() + self._timeout_s, self._cutoff)
        with trio.CancelScope(deadline=deadline, shield=shield) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def cut(self, deadline: float) -> None:
        """Let no write, begun or to come, wait beyond *deadline* (in `trio.current_time()`)."""
        self._cutoff = min(self._cutoff, deadline)
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, self._cutoff)


class Config(hypercorn.config.Config):
    """Hypercorn's settings and the limit on writes."""

    writes: WriteLimit
    websocket_ping_interval: float | None = PING_S


class SafeTaskGroup(TaskGroup):
    """Drops what an application did not receive before its end.

    Otherwise a client that sends on after an early answer fills the queue of an application that reads no more, and
    its connection waits for ever.
    """

    _nursery: trio.Nursery

    async def spawn_app(
        self,
        app: AppWrapper,
        config: hypercorn.config.Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        outbox, inbox = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)

        async def run_app(
            scope: Scope,
            receive: ASGIReceiveCallable,
            send: ASGISendCallable,
            sync_spawn: Callable[..., Any],
            call_soon: Callable[..., Any],
        ) -> None:
            with inbox:
                await app(scope, receive, send, sync_spawn, call_soon)

        async def put(event: ASGIReceiveEvent) -> None:
            with suppress(trio.BrokenResourceError):
                if event["type"] not in ("http.disconnect", "websocket.disconnect"):
                    await outbox.send(event)
                    return
                # This one comes out of the application's own last send(), which must not wait for the application.
                try:
                    outbox.send_nowait(event)
                except trio.WouldBlock:
                    _empty(inbox)
                    outbox.send_nowait(event)

        self._nursery.start_soon(
            _handle, run_app, config, scope, inbox.receive, send, trio.to_thread.run_sync, trio.from_thread.run
        )
        return put


class SafeTCPServer(hypercorn.trio.tcp_server.TCPServer):
    """One connection, whose errors end it and nothing else."""

    config: Config
    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]  # type: ignore[assignment]
    _at_end = False

    async def run(self) -> None:
        try:
            await super().run()
        except Exception as error:
            await self.config.log.warning("a connection was ended by %r", error, exc_info=error)
        except BaseExceptionGroup as group:
            # Errors next to cancellations: the former are reported, the latter must go on.
            errors, others = group.split(Exception)
            if errors is not None:
                await self.config.log.warning("a connection was ended by %r", errors, exc_info=errors)
            if others is not None:
                raise others from None

    async def _read_data(self) -> None:
        """Read until the client has no more to say, and see that too while a pipelined request waits for its turn."""
        to_feed, chunks = trio.open_memory_channel[bytes](1)

        async def feed() -> None:
            async for data in chunks:
                await self.protocol.handle(RawData(data))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            while data := await self._receive():
                await to_feed.send(data)
            nursery.cancel_scope.cancel()
        await self.protocol.handle(Closed())
        # Nothing more will come, so there is no next request to wait for until the idle timeout.
        self._at_end = True
        await self.idle_task.stop()

    async def _receive(self) -> bytes:
        """What comes next; empty at the end, however it came."""
        try:
            return bytes(await self.stream.receive_some(READ_BYTES))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return b""

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            if isinstance(event, Updated) and self._at_end:
                return None
            return await super().protocol_send(event)
        data = event.data
        if isinstance(self.stream, trio.SocketStream) and not self.send_lock.locked():
            # Nearly every write fits into the socket's buffer: one system call, and no lock, scope or reschedule.
            try:
                sent = os.write(self.stream.socket.fileno(), data)
            except OSError:
                sent = 0  # Full, reset or closed: the slow path finds out.
            if sent == len(data):
                return None
            data = data[sent:]
        await self._send_slowly(data)
        return None

    async def _send_slowly(self, data: bytes) -> None:
        delivered = False
        # The lock is awaited under the shield too: bytes already framed for HTTP/2 must not get lost.
        with self.config.writes.scope(shield=True):
            async with self.send_lock:
                try:
                    await self.stream.send_all(data)
                    delivered = True
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
        if not delivered:
            await trio.aclose_forcefully(self.stream)
            await self.protocol.handle(Closed())

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            # A cancelled close leaves the socket open.
            await trio.aclose_forcefully(self.stream)


class BoundedStreamBuffer(hypercorn.protocol.h2.StreamBuffer):
    """Makes a producer wait while the client's window is closed; the original lets it go on after each empty read."""

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise hypercorn.protocol.h2.BufferCompleteError()
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= hypercorn.protocol.h2.BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < hypercorn.protocol.h2.BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class QuickHTTPStream(hypercorn.protocol.http_stream.HTTPStream):
    """One request and its answer, of which the pieces of a stream go a shorter way.

    Attributes:
        chunk: sends a piece as a chunk; None: the body is of another kind, or there is none.
    """

    chunk: Callable[[bytes], Awaitable[None]] | None = None

    async def app_send(self, message: Any) -> None:
        if (
            self.chunk is not None
            and message is not None
            and self.state is ASGIHTTPState.RESPONSE
            and message["type"] == "http.response.body"
            and message.get("more_body")
            and (piece := message.get("body"))
        ):
            await self.chunk(bytes(piece))
        else:
            await super().app_send(message)


class QuickH11Protocol(hypercorn.protocol.h11.H11Protocol):
    """HTTP/1.1 that frames the chunks of a stream itself: h11 takes longer for one than the system does to send it."""

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and isinstance(self.stream, QuickHTTPStream):
            self.stream.chunk = self._chunk if self._is_chunked(event, self.stream) else None
        await super().stream_send(event)

    def _is_chunked(self, head: Response, stream: QuickHTTPStream) -> bool:
        """Whether the body has no length of its own, and the client understands chunks."""
        return (
            isinstance(self.connection, h11.Connection)
            and (self.connection.their_http_version or b"") >= b"1.1"
            and head.status_code >= 200
            and not suppress_body(stream.scope["method"], head.status_code)
            and not any(name.lower() == b"content-length" for name, _ in head.headers)
        )

    async def _chunk(self, piece: bytes) -> None:
        # h11 is in one state from the head to the end, so it need not hear of what is between.
        if self.connection.our_state is h11.SEND_BODY:
            await self.send(RawData(b"%x\r\n%b\r\n" % (len(piece), piece)))
        else:
            await self.stream_send(Body(hypercorn.protocol.h11.STREAM_ID, piece))


class SafeH2Protocol(hypercorn.protocol.h2.H2Protocol):
    """HTTP/2 in which one stream's mistake ends that stream."""

    config: Config

    async def stream_send(self, event: StreamEvent) -> None:
        if not isinstance(event, Body | Data | EndBody | EndData | Trailers):
            return await super().stream_send(event)
        with self.config.writes.scope() as scope:
            await super().stream_send(event)
        if scope.cancelled_caught:  # The client keeps its window shut.
            await self._reset(event.stream_id, h2.errors.ErrorCodes.CANCEL)
            await super()._close_stream(event.stream_id)
        return None

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            match event:
                case h2.events.DataReceived(stream_id=int(stream_id), flow_controlled_length=int(length)) if (
                    stream_id not in self.streams
                ):
                    # The rest of a body that was answered early. Its bytes still count against the connection's window.
                    self.connection.acknowledge_received_data(length, stream_id)
                    await self._flush()
                case h2.events.RequestReceived(stream_id=int(stream_id)) if not _understood(event):
                    await self._reset(stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
                case _:
                    await super()._handle_events([event])

    async def _close_stream(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None and not self.closed and stream.state is ASGIHTTPState.RESPONSE:
            # The application failed inside the body. Without a reset the client would wait for ever.
            await self._reset(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
        await super()._close_stream(stream_id)

    async def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        try:
            self.connection.reset_stream(stream_id, error_code=code)
        except h2.exceptions.ProtocolError:
            return  # The client was quicker.
        await self._flush()


def _empty(inbox: trio.MemoryReceiveChannel[ASGIReceiveEvent]) -> None:
    with suppress(trio.WouldBlock):
        while True:
            inbox.receive_nowait()


def _understood(event: h2.events.RequestReceived) -> bool:
    """Whether Hypercorn can read the request line. It decodes it as ASCII, and mishandles WebSockets over HTTP/2."""
    headers = dict(event.headers or [])
    method, path = headers.get(b":method", b""), headers.get(b":path", b"")
    return bool(method and path) and method.isascii() and path.isascii() and method.upper() != b"CONNECT"


def install() -> None:
    """Put the safe classes in their places. Idempotent.

    Raises:
        StartError: another version of Hypercorn is installed.
    """
    if (found := version("hypercorn")) != HYPERCORN:
        raise StartError(
            f"Hypercorn must be {HYPERCORN}, whose insides are changed here, found {found}: "
            f"pip install hypercorn=={HYPERCORN}"
        )
    for module, name, replacement in (
        (hypercorn.trio.run, "TCPServer", SafeTCPServer),
        (hypercorn.trio.tcp_server, "TaskGroup", SafeTaskGroup),
        (hypercorn.protocol, "H11Protocol", QuickH11Protocol),
        (hypercorn.protocol.h11, "HTTPStream", QuickHTTPStream),
        (hypercorn.protocol, "H2Protocol", SafeH2Protocol),
        (hypercorn.protocol.h2, "StreamBuffer", BoundedStreamBuffer),
        (hypercorn.protocol.h11, "WSStream", SafeWSStream),
        (hypercorn.protocol.ws_stream, "Handshake", PlainHandshake),
    ):
        setattr(module, name, replacement)
