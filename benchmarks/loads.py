"""What is asked of a server, and what is read off its answers. Each load takes a `Target` and gives figures by name.

All loads are 128 tokens in and 128 out unless they say otherwise. `size` shrinks them, to try things out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from statistics import geometric_mean, median
from typing import Any, Final, NamedTuple

import trio

from .client import Answer, Stream, ask
from .prompts import Prompts

Figures = dict[str, float]
IN = OUT = 128
REQUESTS: Final = {1: 3, 8: 16, 32: 32}
"""Streams at once → requests in all."""
TURNS: Final = {1: 4, 32: 2}
"""Streams at once → how often sampling and greedy are asked in turn."""
RUNNING_AFTER: Final = 32
"""Pieces after which a stream counts as running."""


class Target(NamedTuple):
    """A server that answers.

    Attributes:
        sampling: this server's words for temperature 0.8, top-p 0.95, top-k 40, repetition penalty 1.1.
        size: 1 for real; a fraction shortens answers, and prompts where their length is not the point.
    """

    port: int
    prompts: Prompts
    sampling: Mapping[str, Any]
    size: float = 1.0

    def scaled(self, num_tokens: int) -> int:
        return max(4, round(num_tokens * self.size))


async def answers(target: Target, bodies: list[dict[str, Any]], concurrency: int) -> list[Answer]:
    """Ask all of *bodies*, so many at once.

    Raises:
        RuntimeError: one of them was not answered: a figure without it would mean nothing.
    """
    streams = [Stream() for _ in bodies]
    waiting = list(zip(bodies, streams, strict=True))[::-1]

    async def work() -> None:
        while waiting:
            await ask(target.port, *waiting.pop())

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(work)
    found = [Answer(stream) for stream in streams]
    if errors := [answer.error for answer in found if answer.error]:
        raise RuntimeError(f"{len(errors)} of {len(found)} requests failed, the first with: {errors[0]}")
    return found


async def warm(target: Target) -> None:
    """A few short answers, and the length of the template."""
    body = target.prompts.body(64, 4)
    (probe,) = await answers(target, [body], 1)
    words = sum(len(message["content"].split()) for message in body["messages"])
    target.prompts.template_tokens = (probe.prompt_tokens or words + 20) - words
    await answers(target, [target.prompts.body(64, 8) for _ in range(8)], 8)


async def streams(target: Target, concurrency: int) -> Figures:
    """Throughput of so many streams; at 32 also first tokens and gaps."""
    found = await answers(target, _plain(target, concurrency), concurrency)
    figures = {f"http_{concurrency}": _rate(found)}
    # Beside the figures, so that a reader can see that everybody was asked the same.
    figures[f"prompt_tokens_{concurrency}"] = median(answer.prompt_tokens or 0 for answer in found)
    figures[f"least_tokens_{concurrency}"] = min(answer.num_tokens for answer in found)
    figures[f"counted_share_{concurrency}"] = sum(answer.counted for answer in found) / len(found)
    figures[f"ttft_p50_{concurrency}"] = median(answer.text_times[0] - answer.sent for answer in found)
    gaps = sorted(gap for answer in found for gap in answer.gaps)
    figures[f"itl_p50_{concurrency}"] = median(gaps)
    figures[f"itl_p99_{concurrency}"] = gaps[int(len(gaps) * 0.99)]
    return figures


async def sampling(target: Target, concurrency: int) -> Figures:
    """Throughput of sampling as a share of greedy's, several times in turn on the same server.

    What a machine gives changes by more from one second to the next.
    """
    shares = []
    for _ in range(TURNS[concurrency]):
        greedy = await answers(target, _plain(target, concurrency), concurrency)
        drawn = await answers(target, _plain(target, concurrency, **target.sampling), concurrency)
        shares.append(_rate(drawn) / _rate(greedy))
    return {f"sampling_share_{concurrency}": geometric_mean(shares)}


async def shared(target: Target) -> Figures:
    """32 requests of a 400-token prefix nobody has seen and 40 tokens of their own, 64 out; then 32 more of it."""
    prefix = target.prompts.text(target.scaled(400))
    figures = {}
    for name in ("shared_cold", "shared_warm"):
        length = len(prefix.split()) + 40
        bodies = [target.prompts.body(length, target.scaled(64), system=prefix) for _ in range(32)]
        found = await answers(target, bodies, 32)
        figures[name] = _wall(found)
    return figures


async def pause(target: Target) -> Figures:
    """The longest silence of a running stream from the arrival of four 1,700-token prompts to their first tokens.

    In units of that stream's median gap before they came.
    """
    running = Stream(tell_after=RUNNING_AFTER)
    late = [Stream() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, target.port, target.prompts.body(IN, 1500), running)
        await running.running.wait()
        async with trio.open_nursery() as prompts:
            for stream in late:
                prompts.start_soon(ask, target.port, target.prompts.body(target.scaled(1700), 1), stream)
        nursery.cancel_scope.cancel()
    arrived, answered = late[0].sent, max(stream.ended for stream in late)
    for stream in late:
        # One token may be empty text: all that matters is that it was answered.
        if b" 200 " not in stream.pieces[0].split(b"\r\n")[0]:
            raise RuntimeError(f"a long prompt failed: {stream.pieces[0][:300]!r}")
    times = Answer(running).text_times
    before = [time for time in times if time <= arrived]
    usual = median(b - a for a, b in pairwise(before))
    during = [before[-1], *(time for time in times if arrived < time <= answered), answered]
    longest = max(b - a for a, b in pairwise(during))
    return {"pause": longest / usual, "pause_s": longest, "pause_usual_s": usual, "pause_span_s": answered - arrived}


LOADS: Final[dict[str, Callable[[Target], Awaitable[Figures]]]] = {
    "http_1": lambda target: streams(target, 1),
    "http_8": lambda target: streams(target, 8),
    "http_32": lambda target: streams(target, 32),
    "shared": shared,
    "pause": pause,
    "sampling_1": lambda target: sampling(target, 1),
    "sampling_32": lambda target: sampling(target, 32),
}


def _plain(target: Target, concurrency: int, **more: Any) -> list[dict[str, Any]]:
    return [target.prompts.body(IN, target.scaled(OUT), **more) for _ in range(REQUESTS[concurrency])]


def _wall(found: list[Answer]) -> float:
    return max(answer.ended for answer in found) - min(answer.sent for answer in found)


def _rate(found: list[Answer]) -> float:
    return sum(answer.num_tokens for answer in found) / _wall(found)
