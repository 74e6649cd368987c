"""Six ways to break at run time, while 16 streams run on a real line: their tokens are what they were without it.

The sixth, a call that never returns, ends the process; what was streamed before it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import trio
from structlog.typing import EventDict

from headrace.core.engine import Engine
from headrace.hooks.decode import Use
from headrace.hooks.errors import RequestError, RequestFailed, Unavailable
from headrace.hooks.messages import TokenPrompt
from headrace.hooks.settings import Plugins, Sampling, Settings
from tests.integration import strangers
from tests.integration.lines import Answer, Asked, ask, at_once, check_same, death_of, gather, running, settings

Install = Callable[[str, str], ModuleType]

NUM_STREAMS = 16
SLOW_CALL_S = 0.05


def using(model: Path, name: str, **plugins: float) -> Settings:
    made = settings(model, Sampling(extra_processors=(Use(use=name),)), plugin_stall_s=2.5)
    return msgspec.structs.replace(made, plugins=Plugins(**plugins))  # type: ignore[arg-type]


def streams(max_tokens: int = 24) -> list[Asked]:
    """Half of them greedy, half drawn with penalties, which read the history."""
    drawn = {"presence_penalty": 1.0, "repetition_penalty": 1.2, "top_p": 0.9}
    return [
        Asked(
            [65 + index] * (1 + index % 5),
            {"max_tokens": max_tokens, "ignore_eos": True, "temperature": index % 2, "seed": index}
            | (drawn if index % 2 else {}),
        )
        for index in range(NUM_STREAMS)
    ]


def broken(mode: str) -> Asked:
    return Asked([66, 67], {"max_tokens": 40, "ignore_eos": True, "temperature": 0}, {"breaker": {"mode": mode}})


async def outcome_of(engine: Engine, asked: Asked) -> Answer | RequestError:
    try:
        return await ask(engine, asked)
    except RequestError as error:
        return error


async def beside(engine: Engine, mode: str) -> tuple[list[Answer], Answer | RequestError]:
    """What 16 streams and one that breaks among them come to."""
    *answers, outcome = await gather(
        [*(partial(ask, engine, asked) for asked in streams()), partial(outcome_of, engine, broken(mode))]
    )
    return answers, outcome


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("raises", "RuntimeError: on purpose"),
        ("nan", "ValueError: the largest logit must stay finite, found nan"),
        ("shape", "ValueError: [1, 259] torch.float32 must come back, found [1, 3] torch.float32"),
        ("dtype", "ValueError: [1, 259] torch.float32 must come back, found [1, 259] torch.float64"),
    ],
)
async def test_16_streams_keep_their_tokens_beside_a_processor_that_fails_until_it_is_in_quarantine(
    mode: str, reason: str, tiny: Path, install: Install, logs: list[EventDict]
) -> None:
    install("breaker", strangers.BREAKER)
    async with running(Engine(using(tiny, "breaker", quarantine_after=2))) as engine:
        without = await at_once(engine, streams())
        for _ in range(2):
            answers, outcome = await beside(engine, mode)
            check_same(without, answers)
            assert isinstance(outcome, RequestFailed)
            assert str(outcome) == f"logits processor breaker of plugin breaker failed: {reason}"
        answers, refused = await beside(engine, mode)
        check_same(without, answers)
        (cost,) = (each for each in engine.statistics().plugins if each.plugin == "breaker")
    assert isinstance(refused, Unavailable)
    assert "the logits processor breaker of plugin breaker is in quarantine" in str(refused)
    assert (cost.slot, cost.errors, cost.quarantined) == ("logits_processor", 2, 1)
    (entry,) = (entry for entry in logs if "quarantine" in entry["event"])
    assert entry["plugin"] == "breaker"
    assert reason.endswith(entry["reason"])


async def test_16_streams_keep_their_tokens_beside_a_slow_processor_and_it_is_in_quarantine_when_it_returns(
    tiny: Path, install: Install
) -> None:
    assert install("breaker", strangers.BREAKER).SLOW_S > SLOW_CALL_S
    async with running(Engine(using(tiny, "breaker", quarantine_after=2, slow_call_s=SLOW_CALL_S))) as engine:
        without = await at_once(engine, streams())
        answers, outcome = await beside(engine, "slow")
        check_same(without, answers)
        with pytest.raises(Unavailable, match=r"a call must not take longer than 0\.05 s"):
            await ask(engine, broken("slow"))
    assert isinstance(outcome, Unavailable)
    assert "is in quarantine, for it failed 2 times in a row" in str(outcome)


async def test_16_streams_keep_their_tokens_beside_one_that_writes_wherever_it_can(
    tiny: Path, install: Install
) -> None:
    install("breaker", strangers.BREAKER)
    async with running(Engine(using(tiny, "breaker"))) as engine:
        without = await at_once(engine, streams())
        answers, outcome = await beside(engine, "thief")
        check_same(without, answers)
    assert isinstance(outcome, Answer)


async def told(engine: Engine, asked: Asked) -> tuple[list[int], RequestError | None]:
    """The tokens that a request was given, and what it ended with."""
    request = engine.request(TokenPrompt(token_ids=tuple(asked.prompt)), {"logprobs": 2, **asked.params})
    token_ids: list[int] = []
    await engine.submit(request)
    while (delta := await engine.receive(request)) is not None and delta.error is None:
        token_ids += delta.token_ids
    engine.close(request)
    return token_ids, None if delta is None else delta.error


async def test_one_that_never_returns_is_named_within_2_s_and_what_16_streams_were_told_is_right(
    tiny: Path, install: Install, logs: list[EventDict]
) -> None:
    stuck = install("stuck", strangers.STUCK)
    async with running(Engine(using(tiny, "stuck"))) as engine:
        without = await at_once(
            engine, [Asked(each.prompt, each.params, {"stuck": {"after": 999}}) for each in streams()]
        )
    engine = Engine(using(tiny, "stuck"))

    async def live() -> Sequence[tuple[list[int], RequestError | None]]:
        await engine.ready.wait()
        return await gather([partial(told, engine, asked) for asked in streams()])

    try:
        with trio.fail_after(60):
            death, outcomes = await gather([partial(death_of, engine), live])
    finally:
        stuck.release.set()
    assert "logits processor stuck of plugin stuck has kept the compute thread for" in str(death)
    for (token_ids, error), answer in zip(outcomes, without, strict=True):
        assert isinstance(error, Unavailable)
        assert token_ids == list(answer.token_ids[: len(token_ids)])
    assert any(token_ids for token_ids, _ in outcomes)
    (warning,) = (entry for entry in logs if entry["event"] == "the compute thread is held up")
    assert warning["by"] == "logits processor stuck of plugin stuck"
    assert warning["seconds"] <= 2.1
