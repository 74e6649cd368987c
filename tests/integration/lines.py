"""The real line in the test's own event loop: real build, real model, real compute thread; and what to ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import Struct

from headrace.core.engine import Engine, EngineStatistics
from headrace.hooks.errors import EngineDied
from headrace.hooks.messages import Request, TokenLogprobs, TokenPrompt
from headrace.hooks.settings import Line, Model, Sampling, Settings

NEAR_TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places when sums are taken in another order."""
LOGPROB_TOLERANCE = 1e-4


def settings(model: Path | str, sampling: Sampling | None = None, **line: Any) -> Settings:
    return Settings(
        model=Model(uri=str(model), threads=1),
        line=Line(**{"kv_blocks": 1024, "max_prompt_tokens": 100_000, **line}),
        sampling=sampling or Sampling(),
    )


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """*engine*, ready; drained at the end, and then nothing may be held any more."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await engine.ready.wait()
        yield engine
        await engine.drain(60)
    check_nothing_is_held(engine.statistics())
    assert engine.num_live == 0


async def death_of(engine: Engine) -> EngineDied:
    """Run *engine* until it dies."""
    with pytest.raises(EngineDied) as caught:
        await engine.run()
    return caught.value


def check_nothing_is_held(statistics: EngineStatistics) -> None:
    assert (statistics.running, statistics.waiting, statistics.parked) == (0, 0, 0)
    assert (statistics.blocks_used, statistics.slots_used) == (0, 0)
    assert all(channel.depth == 0 for channel in statistics.channels)


class Asked(Struct, frozen=True):
    """A prompt as token ids, and the fields of `SamplingParams`."""

    prompt: Sequence[int]
    params: Mapping[str, object]
    extra: Mapping[str, Mapping[str, object]] = {}


class Answer(Struct, frozen=True):
    """What one choice came to, token by token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


Pause = Callable[[Request], Awaitable[None]]


async def at_once_again(request: Request) -> None:
    """The pause of a reader that keeps up."""


async def until_parked(request: Request) -> None:
    """The pause of a reader that looks only when its request has left the batch for it."""
    mailbox = request.mailbox
    if not len(mailbox):
        await until(lambda: mailbox.parked or mailbox.ended)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what no event announces."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110, for nobody would set an event.
            await trio.sleep(0.002)


async def ask(engine: Engine, asked: Asked, pause: Pause = at_once_again) -> Answer:
    """Ask for one choice and read it to its end, pausing before each delta.

    Raises:
        RequestError: what the request ended with.
    """
    prompt = TokenPrompt(token_ids=tuple(asked.prompt))
    request = engine.request(prompt, {"logprobs": 2, **asked.params}, extra=asked.extra)
    text, token_ids, logprobs = "", list[int](), list[TokenLogprobs]()
    try:
        await engine.submit(request)
        await pause(request)
        while (delta := await engine.receive(request)) is not None:
            if delta.error is not None:
                raise delta.error
            text += delta.text
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            await pause(request)
    finally:
        engine.close(request)
    return Answer(text, tuple(token_ids), tuple(logprobs))


async def one_by_one(engine: Engine, all_asked: Sequence[Asked]) -> list[Answer]:
    return [await ask(engine, asked) for asked in all_asked]


async def at_once(engine: Engine, all_asked: Sequence[Asked], pause: Pause = at_once_again) -> list[Answer]:
    return await gather([partial(ask, engine, asked, pause) for asked in all_asked])


async def gather(functions: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Run *functions* side by side and give what they return, in order."""
    results: dict[int, Any] = {}

    async def keep(index: int, function: Callable[[], Awaitable[Any]]) -> None:
        results[index] = await function()

    async with trio.open_nursery() as nursery:
        for index, function in enumerate(functions):
            nursery.start_soon(keep, index, function)
    return [results[index] for index in range(len(functions))]


def divergence(alone: Answer, other: Answer) -> int | None:
    """The first position at which *other* drew another token than *alone*; None: they are equal, and so are the texts.

    Up to there, and for the distribution at that position too, log-probabilities must agree.
    """
    for position, (expected, found) in enumerate(zip(alone.logprobs, other.logprobs, strict=False)):
        pairs = zip(expected.top_logprobs, found.top_logprobs, strict=True)
        worst = max(abs(one - another) for one, another in pairs)
        assert worst <= LOGPROB_TOLERANCE, f"position {position}: log-probabilities differ by {worst:.1e}"
        if alone.token_ids[position] != other.token_ids[position]:
            return position
    assert (alone.token_ids, alone.text) == (other.token_ids, other.text)
    return None


def is_near_tie(answer: Answer, position: int) -> bool:
    first, second = answer.logprobs[position].top_logprobs
    return first - second < NEAR_TIE


def check_same(alone: Sequence[Answer], together: Sequence[Answer]) -> None:
    """Greedy answers are equal, up to near ties."""
    differ = {index: divergence(*pair) for index, pair in enumerate(zip(alone, together, strict=True))}
    ties = {index: position for index, position in differ.items() if position is not None}
    near = sum(is_near_tie(answer, position) for answer in alone for position in range(len(answer.token_ids)))
    print(f"{len(ties)} of {len(alone)} greedy streams part at one of {near} near ties")
    assert all(is_near_tie(alone[index], position) for index, position in ties.items()), ties
