"""The bytes of an HTTP/1.1 answer: chunks are framed by the server's own hand, and must be h11's to the last byte."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import h11
import hypercorn.protocol.h11
import pytest
from hypercorn.events import RawData
from hypercorn.trio.worker_context import EventWrapper

from headrace.server.hardening import Config, QuickH11Protocol, install

Send = Callable[..., Awaitable[None]]
PIECES = [b"data: one\n\n", b"x", b"", b"y" * 70_000, "data: ä\n\n".encode()]
LENGTH = sum(map(len, PIECES)) + len(b"the end")
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

Headers = list[tuple[bytes, bytes]]


async def nothing(*_: object) -> None:
    pass


async def answers(kind: type, request: bytes, *several: Headers, status: int = 200) -> list[bytes]:
    """What is written when one connection is asked for answers with these headers."""
    install()
    sent: list[bytes] = []

    async def send(event: object) -> None:
        if isinstance(event, RawData):
            sent.append(bytes(event.data))

    async def spawn_app(app: object, config: object, scope: object, send: Send) -> Send:
        say.append(send)
        return nothing

    say: list[Send] = []
    config = Config()
    config.include_date_header = False
    context = SimpleNamespace(event_class=EventWrapper, mark_request=nothing, terminated=EventWrapper())
    apps = SimpleNamespace(spawn_app=spawn_app)
    protocol = kind(None, config, context, apps, {}, False, None, None, send)
    for headers in several:
        await protocol.handle(RawData(request))
        await say[-1]({"type": "http.response.start", "status": status, "headers": headers})
        for piece in PIECES:
            await say[-1]({"type": "http.response.body", "body": piece, "more_body": True})
        await say[-1]({"type": "http.response.body", "body": b"the end", "more_body": False})
    return sent


@pytest.mark.parametrize(
    ("request_bytes", "several", "status"),
    [
        (REQUEST, [[]], 200),
        (REQUEST, [[(b"transfer-encoding", b"chunked")]], 200),
        (REQUEST, [[(b"content-length", b"%d" % LENGTH)]], 200),
        (REQUEST, [[(b"Content-Length", b"%d" % LENGTH)]], 200),
        (REQUEST, [[], [(b"content-length", b"%d" % LENGTH)], []], 200),
        (REQUEST, [[]], 204),
        (REQUEST.replace(b"GET", b"HEAD"), [[]], 200),
        (b"GET / HTTP/1.0\r\nHost: x\r\n\r\n", [[]], 200),
    ],
    ids=["no length", "chunked", "length", "Length", "one after another", "no body", "HEAD", "HTTP/1.0"],
)
async def test_the_bytes_are_those_of_the_library(request_bytes: bytes, several: list[Headers], status: int) -> None:
    theirs = await answers(hypercorn.protocol.h11.H11Protocol, request_bytes, *several, status=status)
    ours = await answers(QuickH11Protocol, request_bytes, *several, status=status)
    assert ours == theirs
    assert len(ours) >= len(several)


async def test_a_stream_is_framed_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    framed: list[object] = []
    send = h11.Connection.send
    monkeypatch.setattr(h11.Connection, "send", lambda self, event: framed.append(event) or send(self, event))
    await answers(QuickH11Protocol, REQUEST, [])
    assert [type(event) for event in framed] == [h11.Response, h11.Data, h11.EndOfMessage]
