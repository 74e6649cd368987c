"""A server that answers completions with the bytes it is given, whatever they are, and lists one model."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
MODELS = b'{"data":[{"id":"odd"}]}'


def text(content: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % content.encode()


FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"

GOOD = SSE + text("a") + text("b") + FINISH + DONE


def whole(body: bytes, *, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    """A response after which the connection stays open."""
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


class Nth:
    """Answers well *good* times, as gauging needs it, then with *odd*."""

    def __init__(self, odd: bytes, *, good: int = 1) -> None:
        self._odd = odd
        self._good = good

    def __call__(self, body: bytes) -> bytes:
        self._good -= 1
        return GOOD if self._good >= 0 else self._odd


class OddServer:
    """Attributes:
    bodies: of the completions asked for, in order.
    num_connections: accepted so far.
    """

    def __init__(self, answer: Callable[[bytes], bytes], *, closes: bool = True) -> None:
        self._answer = answer
        self._closes = closes
        self.url = ""
        self.bodies: list[bytes] = []
        self.num_connections = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        self.num_connections += 1
        async with stream:
            while (request := await self._read(stream)) is not None:
                head, body = request
                if not head.startswith(b"POST /v1/"):
                    answer = whole(MODELS) if head.startswith(b"GET") else whole(b"{}", status=b"404 Not Found")
                    await stream.send_all(answer)
                    continue
                self.bodies.append(body)
                await stream.send_all(self._answer(body))
                if self._closes:
                    return

    async def _read(self, stream: trio.SocketStream) -> tuple[bytes, bytes] | None:
        data = b""
        try:
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some()
                if not more:
                    return None
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += await stream.receive_some()
        except trio.BrokenResourceError:
            return None
        return head, body


@asynccontextmanager
async def odd_server(answer: bytes | Callable[[bytes], bytes], *, closes: bool = True) -> AsyncIterator[OddServer]:
    """Serve on a free port."""
    server = OddServer((lambda _: answer) if isinstance(answer, bytes) else answer, closes=closes)
    async with trio.open_nursery() as nursery:
        listen = partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1")
        (listener,) = await nursery.start(listen)
        server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        yield server
        nursery.cancel_scope.cancel()
