"""A client that stops reading holds up nobody, fills nothing, and loses nothing.

A real server in front of a real line; only the model is fake, so that a stream of a hundred thousand tokens is quick.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import pytest
import trio

from headrace.core.engine import Engine
from headrace.core.kv.blocks import BlockPool
from headrace.hooks.config import Server
from headrace.hooks.messages import Admit, Delta, Release, Request, Step, StepResult
from headrace.hooks.settings import Settings
from headrace.server.metrics import Metrics
from headrace.server.serve import listen, serve
from tests.fakes import counting, make_parts
from tests.integration.lines import until
from tests.server.site import Site, running
from tests.server.wire import post, read_until

MAILBOX_DELTAS = 64
RECEIVE_BUFFER = 4096
STEPS_IN_FLIGHT = 2


class Done:
    """A step that took no time."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    async def result(self) -> StepResult:
        await trio.lowlevel.checkpoint()
        return self._result


class CountingExecutor:
    """Says after each token the next number. Looks at no KV cache, so that a long stream costs no more a step."""

    def __init__(self, pool: BlockPool) -> None:
        self._last: dict[int, int] = {}

    def submit(self, step: Step) -> Done:
        for op in step.slot_ops:
            if isinstance(op, Admit):
                self._last[op.slot] = op.prompt_ids[-1]
            elif isinstance(op, Release):
                del self._last[op.slot]
        token_ids = []
        for slot in step.sample_slots:
            self._last[slot] = counting([self._last[slot]])
            token_ids.append(self._last[slot])
        result = StepResult(token_ids=token_ids, logprobs={}, errors={}, forward_s=0.0, sample_s=0.0)
        return Done(result)


def counted(first: int, num_tokens: int) -> str:
    """What `CountingExecutor` says after *first*."""
    texts, last = [], first
    for _ in range(num_tokens):
        last = counting([last])
        texts.append(f"{last} ")
    return "".join(texts)


class WatchedEngine(Engine):
    """Remembers its requests, and what was taken out of each mailbox."""

    def __init__(self) -> None:
        parts = make_parts(
            num_blocks=2200, block_size=1024, max_model_len=2_000_000, prefix_cache=False, executor=CountingExecutor
        )
        super().__init__(Settings(), parts=parts)
        self.requests: list[Request] = []
        self.num_taken: dict[Request, int] = {}
        self.largest: dict[Request, int] = {}

    def request(self, *args: object, **rest: object) -> Request:
        request = super().request(*args, **rest)  # type: ignore[arg-type]
        self.requests.append(request)
        self.num_taken[request] = self.largest[request] = 0
        return request

    async def receive(self, request: Request) -> Delta | None:
        return self._took(request, await super().receive(request))

    def receive_nowait(self, request: Request) -> Delta | None:
        return self._took(request, super().receive_nowait(request))

    def _took(self, request: Request, delta: Delta | None) -> Delta | None:
        if delta is not None:
            self.num_taken[request] += delta.num_tokens
            self.largest[request] = max(self.largest[request], len(delta.text))
        return delta

    def num_untaken(self, request: Request) -> int:
        """Tokens that lie in the mailbox."""
        return request.num_output_tokens - self.num_taken[request]


class Stalled(NamedTuple):
    """A client that reads no more, and its request, which is parked."""

    stream: trio.SocketStream
    read: bytes
    request: Request


@asynccontextmanager
async def stalled(site: Site, engine: WatchedEngine, num_tokens: int) -> AsyncIterator[Stalled]:
    """Ask for a long stream and read no more than its beginning."""
    async with await site.connect(RECEIVE_BUFFER) as stream:
        await stream.send_all(question(num_tokens))
        read = await read_until(stream, b"\r\n\r\n")
        (request,) = engine.requests
        await until(lambda: engine.statistics().parked == 1)
        yield Stalled(stream, read, request)


def question(num_tokens: int, first: int = 7) -> bytes:
    fields = {"messages": [{"role": "user", "content": str(first)}], "max_tokens": num_tokens, "stream": True}
    return post(extra="Connection: close\r\n", **fields)


def text_of(answer: bytes) -> str:
    """The text in the events of an answer."""
    lines = unchunked(answer.partition(b"\r\n\r\n")[2]).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if not line.startswith(":")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def unchunked(body: bytes) -> bytes:
    data, start = [], 0
    while size := int(body[start : (end := body.index(b"\r\n", start))], 16):
        data.append(body[end + 2 : end + 2 + size])
        start = end + 2 + size + 2
    return b"".join(data)


async def read_to_the_end(stream: trio.SocketStream) -> bytes:
    with trio.fail_after(300):
        return b"".join([part async for part in stream])


async def ask(site: Site, num_tokens: int, first: int) -> str:
    async with await site.connect() as stream:
        await stream.send_all(question(num_tokens, first))
        return text_of(await read_to_the_end(stream))


async def test_a_reader_that_stops_is_parked_within_its_mailbox_and_no_channel_grows() -> None:
    engine = WatchedEngine()
    async with running(engine, write_timeout_s=600.0) as site, stalled(site, engine, 1_000_000) as client:
        request = client.request
        await ask(site, 5, 1)  # By then the steps that were in flight have come back.
        parked_at = engine.num_untaken(request)
        assert MAILBOX_DELTAS < parked_at <= MAILBOX_DELTAS + 1 + STEPS_IN_FLIGHT
        assert len(request.mailbox) == MAILBOX_DELTAS + 1
        for first in range(20):
            await ask(site, 50, first)
            assert engine.num_untaken(request) == parked_at
            assert all(channel.depth <= 1 for channel in engine.statistics().channels)


async def test_other_streams_get_a_delta_every_step_meanwhile() -> None:
    engine = WatchedEngine()
    async with running(engine, write_timeout_s=600.0) as site, stalled(site, engine, 1_000_000):
        before = engine.statistics().steps_total
        assert await ask(site, 2000, 500) == counted(500, 2000)
        assert engine.statistics().steps_total - before <= 2000 + STEPS_IN_FLIGHT


@pytest.mark.parametrize("num_tokens", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_after_it_reads_again_its_text_is_the_same_to_the_byte(num_tokens: int) -> None:
    engine = WatchedEngine()
    async with running(engine, write_timeout_s=600.0) as site, stalled(site, engine, num_tokens) as client:
        text = text_of(client.read + await read_to_the_end(client.stream))
        assert engine.largest[client.request] <= 64 * 1024
    assert text == counted(7, num_tokens)


async def test_a_shutdown_while_it_does_not_read_ends_within_its_budget() -> None:
    engine = WatchedEngine()
    server = Server(host="127.0.0.1", port=0, drain_s=1.0, write_timeout_s=60.0)
    sock = listen(server.host, server.port, write_timeout_s=server.write_timeout_s)
    site = Site(engine, sock.getsockname(), "http://unused")
    async with trio.open_nursery() as nursery, site.client:
        await nursery.start(partial(serve, engine, sock, server, metrics=Metrics()))
        await engine.ready.wait()
        async with stalled(site, engine, 1_000_000):
            started = trio.current_time()
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: not nursery.child_tasks, 10)
            assert 1.0 <= trio.current_time() - started <= 1.0 + 0.5 + 1.0
