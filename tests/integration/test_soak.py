"""A thousand clients, three in ten of whom leave in the middle: afterwards the server holds what it held before."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import trio

from tests.integration.processes import running
from tests.server.wire import post, reset

LEAVES = 0.3
AT_ONCE = 24
ANSWER_S = 60


async def test_a_thousand_requests_leave_nothing_behind(tiny: Path) -> None:
    with running([sys.executable, "-m", "tests.integration.serve_tiny", str(tiny)]) as child:
        address = line_of(child).removeprefix("http://").split(":")
        rng = random.Random(7)
        ends = await visit(address, rng, 200)
        early = await held_when_idle(child)
        ends += await visit(address, rng, 800)
        late = await held_when_idle(child)
    assert ends.total() == 1000
    assert ends["wrong"] == 0
    assert 250 < ends["left"] < 350
    assert late["rss"] <= 1.05 * early["rss"]
    assert {**late, "rss": 0} == {**early, "rss": 0}
    print(ends, early["rss"], late["rss"])


def line_of(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().decode().strip()


async def held_when_idle(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the process holds once it has noticed that everybody has gone."""
    with trio.fail_after(ANSWER_S):
        while True:
            child.send_signal(signal.SIGUSR1)
            held: dict[str, Any] = json.loads(line_of(child))
            names = ("live", "running", "waiting", "parked", "blocks", "slots", "messages")
            if not any(held[name] for name in names):
                await trio.sleep(1)  # For connections that are closed but not yet collected.
                child.send_signal(signal.SIGUSR1)
                return dict(json.loads(line_of(child)))
            await trio.sleep(0.05)


async def visit(address: list[str], rng: random.Random, num_requests: int) -> Counter[str]:
    """Send *num_requests*, and count how they ended."""
    ends: Counter[str] = Counter()
    seeds = iter([rng.random() for _ in range(num_requests)])

    async def clients() -> None:
        for seed in seeds:
            ends[await one(address, random.Random(seed))] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(clients)
    return ends


async def one(address: list[str], rng: random.Random) -> str:
    """One client, who reads to the end or leaves somewhere, politely or not."""
    streams = rng.random() < 0.7
    request = post(
        extra="Connection: close\r\n",
        messages=[{"role": "user", "content": "x" * rng.choice([1, 10, 100, 300])}],
        max_tokens=rng.choice([1, 5, 20, 60]),
        n=rng.choice([1, 1, 1, 3]),
        stream=streams,
    )
    leaves_after = rng.choice([-1, 0, 1, 500, 3000]) if rng.random() < LEAVES else None
    with trio.fail_after(ANSWER_S):
        stream = await trio.open_tcp_stream(address[0], int(address[1]))
        async with stream:
            if leaves_after is not None:
                await leave(stream, request, leaves_after, rng)
                return "left"
            await stream.send_all(request)
            answer = b"".join([part async for part in stream])
    return "whole" if is_whole(answer, streams) else "wrong"


async def leave(stream: trio.SocketStream, request: bytes, after: int, rng: random.Random) -> None:
    """Leave in the middle of the request (-1), right behind it (0), or after so many bytes of the answer."""
    await stream.send_all(request[: len(request) // 2] if after < 0 else request)
    num_read = 0
    while num_read < after and (part := await stream.receive_some(after - num_read)):
        num_read += len(part)
    if rng.random() < 0.5:
        reset(stream)


def is_whole(answer: bytes, streams: bool) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return False
    return b"data: [DONE]\n\n" in body if streams else "usage" in json.loads(body)
