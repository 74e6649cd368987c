"""Connections to one server, kept open from request to request, and the one task that reads them all.

Receives requests as bytes; gives responses to a `Sink` as they come. TLS, and Windows, whose selectors cannot be waited
for, are read by the task that asked.
"""

from __future__ import annotations

import os
import selectors
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from ...hooks.errors import StartError
from .framing import CutShort, WireError
from .wire import READ_BYTES, Address, Exchange, Sink

Readable = Callable[[], None]
Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class Reader:
    """Waits for all sockets at once: a selector can itself be waited for, and is told of each socket once a request."""

    works = sys.platform != "win32"

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    async def run(self) -> None:
        wait = trio.lowlevel.wait_readable
        number: int = self._selector.fileno()
        while True:
            await wait(number)
            for key, _ in self._selector.select(0):
                key.data()

    async def read(self, number: int, exchange: Exchange) -> None:
        """Give what comes on a socket to *exchange* until that is complete."""
        done = trio.Event()
        failure: list[Exception] = []

        def readable() -> None:
            try:
                complete = exchange.receive(os.read(number, READ_BYTES))
            except BlockingIOError:
                return
            except Exception as error:  # The task that asked is the one to hear of it.
                failure.append(error)
                complete = True
            if complete:
                done.set()
                self._selector.unregister(number)

        self._selector.register(number, selectors.EVENT_READ, readable)
        try:
            await done.wait()
        finally:
            if not done.is_set():
                self._selector.unregister(number)
        if failure:
            raise failure[0]

    def close(self) -> None:
        self._selector.close()


class Connections:
    """Sends requests to one server.

    Attributes:
        url: of the server, without `/v1`.

    Args:
        headers: of each request, besides those of its body.
    """

    def __init__(self, address: Address, headers: dict[str, str], reader: Reader) -> None:
        self.url = f"{'https' if address.tls else 'http'}://{address.authority}{address.base}"
        self._address = address
        self._headers = [("host", address.authority), *headers.items()]
        self._reader = reader
        self._idle: list[Stream] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def send(self, method: str, path: str, body: bytes, sink: Sink) -> None:
        """Send a request and give its response to *sink*.

        Raises:
            OSError: nobody answers there.
            WireError: the answer is not HTTP, or ends too soon.
        """
        while True:
            reused = bool(self._idle)
            stream = self._idle.pop() if reused else await self._connect()
            exchange = Exchange(sink)
            try:
                await self._exchange(stream, exchange, method, path, body)
            except (WireError, OSError, trio.BrokenResourceError) as error:
                # A server may close an idle connection just when it is used again.
                if reused and not exchange.begun:
                    continue
                raise error if isinstance(error, WireError) else CutShort(f"the connection broke: {error}") from None
            finally:
                if exchange.reusable:
                    self._idle.append(stream)
                else:
                    await trio.aclose_forcefully(stream)
            return

    async def _exchange(self, stream: Stream, exchange: Exchange, method: str, path: str, body: bytes) -> None:
        headers = [*self._headers, ("content-length", str(len(body))), ("content-type", "application/json")]
        await stream.send_all(exchange.request(method, self._address.base + path, headers, body))
        if isinstance(stream, trio.SocketStream) and Reader.works:
            await self._reader.read(stream.socket.fileno(), exchange)
            return
        while not exchange.receive(bytes(await stream.receive_some(READ_BYTES))):
            pass

    async def _connect(self) -> Stream:
        if self._tls is None:
            return await trio.open_tcp_stream(self._address.host, self._address.port)
        return await trio.open_ssl_over_tcp_stream(self._address.host, self._address.port, ssl_context=self._tls)

    async def close(self) -> None:
        for stream in self._idle:
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def connected(address: Address, headers: dict[str, str]) -> AsyncIterator[Connections]:
    """Connections that are closed in the end."""
    reader = Reader()
    connections = Connections(address, headers, reader)
    failure: StartError | KeyboardInterrupt | None = None
    try:
        async with trio.open_nursery() as nursery:
            if Reader.works:
                nursery.start_soon(reader.run)
            try:
                yield connections
            except (StartError, KeyboardInterrupt) as error:
                failure = error  # The nursery would wrap it.
            nursery.cancel_scope.cancel()
    finally:
        await connections.close()
        reader.close()
    if failure is not None:
        raise failure
