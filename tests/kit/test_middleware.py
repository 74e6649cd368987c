"""The contract of middleware: what it lets pass, and what it catches."""

from __future__ import annotations

from contextlib import suppress

import pytest

from headrace.hooks.testing.contract import run
from tests.kit.faults import contract_of, failures


class Wrapper:
    """Adds a header."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def send_more(message):
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-mill", b"1")]}
            await send(message)

        await self.app(scope, receive, send_more)


def middleware(call):
    wrapper = type("Faulty", (Wrapper,), {"__call__": call})
    return type("Middleware", (), {"__call__": lambda self, app: wrapper(app)})


Good = middleware(Wrapper.__call__)


async def twice(self, scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await self.app(scope, receive, send)


async def eats(self, scope, receive, send):
    if scope["type"] == "http":
        await receive()
    await self.app(scope, receive, send)


async def buffers(self, scope, receive, send):
    said = []

    async def keep(message):
        said.append(message)

    await self.app(scope, receive, keep)
    for message in said:
        await send(message)


async def hides(self, scope, receive, send):
    with suppress(LookupError):
        await self.app(scope, receive, send)


async def http_only(self, scope, receive, send):
    if scope["type"] != "lifespan":
        scope["method"]
    await Wrapper.__call__(self, scope, receive, send)


async def no_lifespan(self, scope, receive, send):
    if scope["type"] != "lifespan":
        await Wrapper.__call__(self, scope, receive, send)


async def mixes(self, scope, receive, send):
    self.send = send

    async def to_last(message):
        await self.send(message)

    await self.app(scope, receive, to_last)


FAULTS = [
    ("test_an_answer_passes", twice),
    ("test_the_body_of_a_request_passes", eats),
    ("test_a_stream_is_not_held_back", buffers),
    ("test_an_error_of_the_application_passes", hides),
    ("test_a_websocket_passes", http_only),
    ("test_the_lifespan_passes", no_lifespan),
    ("test_two_requests_at_once_do_not_mix", mixes),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("middleware", Good)).values()) == {None}


@pytest.mark.parametrize(("test", "call"), FAULTS)
def test_a_planted_fault_is_caught(test, call):
    assert test in failures(contract_of("middleware", middleware(call)), [test])
