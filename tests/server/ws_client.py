"""A WebSocket client for tests: frames are wsproto's, or whatever bytes a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, TextMessage

from tests.server.site import Site
from tests.server.wire import read_until

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
MASK = b"\x01\x02\x03\x04"


class Closed(Exception):
    """The server has closed the socket; 1006: without saying so."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code = code


def handshake(*, protocol: str | None = "headrace.v1", key: str | None = KEY, **headers: str) -> bytes:
    """The request that opens a socket; *headers* with _ for -."""
    lines = ["GET /v1/ws HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    lines += [f"Sec-WebSocket-Key: {key}"] if key is not None else []
    lines += [f"Sec-WebSocket-Protocol: {protocol}"] if protocol is not None else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def frame(opcode: int, payload: bytes, *, fin: bool = True, rsv: int = 0, masked: bool = True) -> bytes:
    """Any frame, right or wrong."""
    head = bytes([fin << 7 | rsv << 4 | opcode])
    mask_bit = masked << 7
    if len(payload) < 126:
        head += bytes([mask_bit | len(payload)])
    elif len(payload) < 2**16:
        head += bytes([mask_bit | 126]) + len(payload).to_bytes(2, "big")
    else:
        head += bytes([mask_bit | 127]) + len(payload).to_bytes(8, "big")
    if not masked:
        return head + payload
    stream = (MASK * (len(payload) // 4 + 1))[: len(payload)]
    mixed = int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")
    return head + MASK + mixed.to_bytes(len(payload), "big")


class Client:
    """An open socket."""

    def __init__(self, stream: trio.SocketStream, response: bytes) -> None:
        self.stream = stream
        self.response, _, rest = response.partition(b"\r\n\r\n")
        self.connection = Connection(ConnectionType.CLIENT, trailing_data=rest)
        self.answers_pings = True
        self._events = self.connection.events()
        self._text = ""

    async def send(self, type: str, **fields: object) -> None:
        await self.send_text(json.dumps({"type": type, **fields}))

    async def send_text(self, text: str) -> None:
        await self.stream.send_all(frame(1, text.encode()))

    async def start(self, id: str, *, kind: str = "chat", **fields: object) -> None:
        body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
        if kind == "completion":
            body = {"prompt": "hi", "max_tokens": 3, **fields}
        await self.send("start", id=id, kind=kind, request=body)

    async def receive(self) -> dict[str, object]:
        """The next message.

        Raises:
            Closed: there is none any more.
        """
        with trio.fail_after(50):
            while True:
                for event in self._events:
                    match event:
                        case TextMessage():
                            self._text += event.data
                            if event.message_finished:
                                text, self._text = self._text, ""
                                return json.loads(text)
                        case Ping() if self.answers_pings:
                            await self.stream.send_all(self.connection.send(event.response()))
                        case CloseConnection():
                            raise Closed(event.code, event.reason or "")
                await self._read()

    async def _read(self) -> None:
        try:
            data = await self.stream.receive_some(65536)
        except trio.BrokenResourceError:
            data = b""
        if not data:
            raise Closed(1006)
        self.connection.receive_data(data)
        self._events = self.connection.events()

    async def answer(self, id: str) -> tuple[list[dict[str, object]], dict[str, object]]:
        """The deltas of a request, and its ending; other messages are dropped."""
        deltas = []
        while True:
            message = await self.receive()
            if message.get("id") == id:
                if message["type"] != "delta":
                    return deltas, message
                deltas.append(message)

    async def close_code(self) -> int:
        """The code with which the server closes, after whatever it still says."""
        try:
            while True:
                await self.receive()
        except Closed as closed:
            return closed.code


@asynccontextmanager
async def connected(site: Site, receive_buffer: int | None = None, **headers: str) -> AsyncIterator[Client]:
    async with await site.connect(receive_buffer) as stream:
        await stream.send_all(handshake(**headers))
        response = await read_until(stream, b"\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 101 "), response
        yield Client(stream, response)


def text_of(deltas: list[dict[str, object]], choice: int = 0) -> str:
    return "".join(str(delta["text"]) for delta in deltas if delta["choice"] == choice)
