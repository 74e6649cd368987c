"""Raw clients for tests: HTTP/1.1 by hand, HTTP/2 with or without the library's good manners."""

import json
import socket
import struct

import h2.config
import h2.connection
import h2.events
import trio


def post(path: str = "/v1/chat/completions", *, extra: str = "", **fields: object) -> bytes:
    """A chat request as bytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body


def reset(stream: trio.SocketStream) -> None:
    """Close with RST instead of FIN."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    data = b""
    with trio.fail_after(10):
        while mark not in data:
            more = await stream.receive_some(65536)
            if not more:
                raise EOFError(data)
            data += more
    return data


async def read_all(stream: trio.SocketStream) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    data = b""
    with trio.fail_after(10):
        try:
            while more := await stream.receive_some(65536):
                data += more
        except trio.BrokenResourceError:
            pass
    return data


class H2Client:
    """An HTTP/2 connection with prior knowledge whose frames a test may forge."""

    def __init__(self, stream: trio.SocketStream, **settings: int) -> None:
        config = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.stream = stream
        self.events: list[h2.events.Event] = []
        self.auto_window = True

    async def flush(self) -> None:
        await self.stream.send_all(self.connection.data_to_send())

    async def open(self, *, path: bytes = b"/v1/chat/completions", end: bool = False, method: bytes = b"POST") -> int:
        """Open a stream with a request's headers."""
        stream_id = self.connection.get_next_available_stream_id()
        headers = [(b":method", method), (b":path", path), (b":scheme", b"http"), (b":authority", b"x")]
        self.connection.send_headers(stream_id, headers, end_stream=end)
        await self.flush()
        return stream_id

    async def request(self, body: bytes) -> int:
        stream_id = await self.open()
        self.connection.send_data(stream_id, body, end_stream=True)
        await self.flush()
        return stream_id

    async def until(self, kind: type[h2.events.Event], stream_id: int | None = None) -> h2.events.Event:
        """Receive until such an event comes."""
        with trio.fail_after(10):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                        return event
                data = await self.stream.receive_some(65536)
                if not data:
                    raise EOFError(self.events)
                for event in self.connection.receive_data(data):
                    self.events.append(event)
                    if self.auto_window and isinstance(event, h2.events.DataReceived):
                        self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                await self.flush()

    def body(self, stream_id: int) -> bytes:
        data = [e.data for e in self.events if isinstance(e, h2.events.DataReceived) and e.stream_id == stream_id]
        return b"".join(data)


CHAT_BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
STREAM_BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}).encode()
