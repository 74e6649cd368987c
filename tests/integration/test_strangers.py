"""Plugins that misbehave on the compute thread of a real line: who pays for it, and what is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import trio
from structlog.typing import EventDict

from headrace.core.engine import Engine
from headrace.hooks.decode import Use
from headrace.hooks.errors import RequestFailed, Unavailable
from headrace.hooks.settings import Sampling
from tests.integration import strangers
from tests.integration.lines import Answer, Asked, ask, check_same, death_of, gather, running, settings

Install = Callable[[str, str], ModuleType]


def using(name: str) -> Sampling:
    return Sampling(extra_processors=(Use(use=name),))


# ── one that fails ────────────────────────────────────────────────────────────────────────────────────────────────


def questions() -> list[Asked]:
    return [Asked([65 + index] * (index + 1), {"max_tokens": 20, "temperature": 0}) for index in range(8)]


async def failure_of(engine: Engine, asked: Asked) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await ask(engine, asked)
    return caught.value


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("raise", "RuntimeError: on purpose"),
        ("nan", "ValueError: the largest logit must stay finite, found nan"),
        ("shape", r"ValueError: \[1, 259\] torch.float32 must come back, found \[3\]"),
        ("refuse", "RuntimeError: on purpose"),
    ],
)
async def test_a_logits_processor_that_fails_ends_its_own_request_and_no_other(
    mode: str, reason: str, tiny: Path, install: Install
) -> None:
    install("naughty", strangers.NAUGHTY)
    bad = Asked([66, 67, 68], {"max_tokens": 20, "temperature": 0}, {"naughty": {"mode": mode}})
    async with running(Engine(settings(tiny, using("naughty")))) as engine:
        without: list[Answer] = await gather([partial(ask, engine, asked) for asked in questions()])
        others = [partial(ask, engine, asked) for asked in questions()]
        *together, failed = await gather([*others, partial(failure_of, engine, bad)])
        after = await ask(engine, questions()[0])
    check_same(without, together)
    check_same(without[:1], [after])
    assert failed.plugin == "naughty"
    with pytest.raises(RequestFailed, match=f"logits processor naughty of plugin naughty failed: {reason}"):
        raise failed


# ── one that never returns ────────────────────────────────────────────────────────────────────────────────────────


async def errors_of(engine: Engine, all_asked: Sequence[Asked]) -> list[Unavailable]:
    async def error_of(asked: Asked) -> Unavailable:
        with pytest.raises(Unavailable) as caught:
            await ask(engine, asked)
        return caught.value

    return await gather([partial(error_of, asked) for asked in all_asked])


async def test_a_plugin_that_never_returns_is_named_within_2_s_and_then_ends_the_engine(
    tiny: Path, install: Install, logs: list[EventDict]
) -> None:
    stuck = install("stuck", strangers.STUCK)
    engine = Engine(settings(tiny, using("stuck"), plugin_stall_s=2.5))
    asked = Asked([65], {"max_tokens": 20}, {"stuck": {}})
    who = "logits processor stuck of plugin stuck"

    async def live() -> list[Unavailable]:
        await engine.ready.wait()
        return await errors_of(engine, [asked] * 3)

    try:
        with trio.fail_after(30):
            death, errors = await gather([partial(death_of, engine), live])
    finally:
        stuck.release.set()
    assert f"{who} has kept the compute thread for" in str(death)
    assert [who in str(error) for error in errors] == [True] * 3
    assert engine.state == "dead"
    (warning,) = (entry for entry in logs if entry["event"] == "the compute thread is held up")
    assert warning["by"] == who
    assert warning["seconds"] <= 2.1
