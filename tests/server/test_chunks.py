"""The bytes of an HTTP/1.1 answer: chunks are framed by the server's own hand, and must be h11's to the last byte."""

from types import SimpleNamespace

import hypercorn.protocol.h11
import pytest
from hypercorn.events import RawData
from hypercorn.protocol.events import Body, EndBody, Event, Response
from hypercorn.trio.worker_context import EventWrapper

from headrace.server.hardening import Config, QuickH11Protocol

PIECES = [b"data: one\n\n", b"x", b"", b"y" * 70_000, "data: ä\n\n".encode()]
LENGTH = str(sum(map(len, PIECES))).encode()
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

Headers = list[tuple[bytes, bytes]]


async def nothing(*_: object) -> None:
    pass


async def spawn_app(*_: object) -> object:
    return nothing


async def answers(kind: type, request: bytes, *several: Headers) -> list[bytes]:
    """What is written when one connection is asked for answers with these headers."""
    sent: list[bytes] = []

    async def send(event: object) -> None:
        if isinstance(event, RawData):
            sent.append(bytes(event.data))

    config = Config()
    config.include_date_header = False
    context = SimpleNamespace(event_class=EventWrapper, mark_request=nothing, terminated=EventWrapper())
    apps = SimpleNamespace(spawn_app=spawn_app)
    protocol = kind(None, config, context, apps, {}, False, None, None, send)
    for headers in several:
        await protocol.handle(RawData(request))
        events: list[Event] = [Response(stream_id=1, headers=headers, status_code=200)]
        events += [Body(stream_id=1, data=piece) for piece in PIECES]
        for event in (*events, EndBody(stream_id=1)):
            await protocol.stream_send(event)
        if len(several) > 1:
            protocol.connection.start_next_cycle()
    return sent


@pytest.mark.parametrize(
    ("request_bytes", "several"),
    [
        (REQUEST, [[]]),
        (REQUEST, [[(b"transfer-encoding", b"chunked")]]),
        (REQUEST, [[(b"content-length", LENGTH)]]),
        (REQUEST, [[(b"Content-Length", LENGTH)]]),
        (REQUEST, [[], [(b"content-length", LENGTH)], []]),
        (b"GET / HTTP/1.0\r\nHost: x\r\n\r\n", [[]]),
    ],
    ids=["no length", "chunked", "length", "Length", "one after another", "HTTP/1.0"],
)
async def test_the_bytes_are_those_of_the_library(request_bytes: bytes, several: list[Headers]) -> None:
    theirs = await answers(hypercorn.protocol.h11.H11Protocol, request_bytes, *several)
    ours = await answers(QuickH11Protocol, request_bytes, *several)
    assert [piece for piece in ours if piece] == [piece for piece in theirs if piece]
    assert len(ours) == len(several) * (2 + len(PIECES))
