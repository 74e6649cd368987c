"""A scheduler policy that fails in any way: first come, first served stands in, and the line goes on."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
import trio
from trio.testing import MockClock

from headrace.core.batch.live import Live
from headrace.core.batch.waiting import Waiting, plain
from headrace.core.containment import Account, Ledger
from headrace.core.timeline import Timeline
from headrace.hooks.components import Bound
from headrace.hooks.messages import Request, Sequence, TokenPrompt
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import RunningView, WaitingView
from tests.core.test_line import line
from tests.fakes import answer, ask, make_parts, text_of

Order = Callable[[int], object]


class LastFirst:
    """Whoever came last starts first, unless *odd* says otherwise of the n-th call."""

    def __init__(self, odd: Order = lambda call: None) -> None:
        self.odd = odd
        self.calls = 0

    def order(self, waiting: WaitingView, now: float) -> tuple[object, ...]:
        return self._key(-waiting.arrival)

    def victim(self, running: RunningView) -> tuple[object, ...]:
        return self._key(-running.arrival)

    def _key(self, key: float) -> tuple[object, ...]:
        self.calls += 1
        found = self.odd(self.calls)
        return (key,) if found is None else found  # type: ignore[return-value]


def raises(call: int) -> object:
    raise ZeroDivisionError("on purpose")


class Mailbox:
    parked = False


class Desk:
    """Who waits, and where they were put."""

    def __init__(self, policy: object, **limits: int) -> None:
        self.account = Account("scheduler_policy", "acme", "odd", **limits)
        self.waiting = Waiting(policy, self.account, lambda: 0.0)  # type: ignore[arg-type]
        self.lives: list[Live] = []

    def arrive(self) -> None:
        index = len(self.lives)
        request = Request(
            id=str(index),
            prompt=TokenPrompt(token_ids=()),
            params=SamplingParams(),
            chain=(),
            mailbox=Mailbox(),  # type: ignore[arg-type]
            timeline=Timeline(lambda: 0.0),
            arrival=float(index),
        )
        sequence = Sequence(index=index, request=request, choice=0)
        self.lives.append(Live(sequence, request.prompt_ids, num_prompt=0, max_tokens=1))
        self.waiting.add(self.lives[-1])

    def order(self) -> list[int]:
        return [live.sequence.index for live in self.waiting.first(100)]

    def victims(self) -> list[int]:
        return [live.sequence.index for live in self.waiting.victims(self.lives)]


def desk(policy: object, num_waiting: int = 4, **limits: int) -> Desk:
    made = Desk(policy, **limits)
    for _ in range(num_waiting):
        made.arrive()
    return made


ODD = {
    "raises": raises,
    "gives NaN": lambda call: (math.nan,),
    "gives no tuple": lambda call: [1],
    "gives objects": lambda call: (object(),),
    "gives nothing": lambda call: 0,
    "gives keys that do not compare": lambda call: ("a",),
}


def test_a_policy_that_works_is_obeyed() -> None:
    good = desk(LastFirst())
    assert (good.order(), good.victims(), good.account.errors) == ([3, 2, 1, 0], [0, 1, 2, 3], 0)


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_one_failure_is_first_come_first_served_for_that_cycle(odd: Order) -> None:
    shaky = desk(LastFirst(lambda call: odd(call) if call == 4 else None))
    assert (shaky.order(), shaky.account.errors) == ([0, 1, 2, 3], 1)
    shaky.arrive()
    assert (shaky.order(), shaky.account.errors) == ([4, 3, 2, 1, 0], 1)


@pytest.mark.parametrize("odd", [odd for name, odd in ODD.items() if "compare" not in name])
def test_after_several_failures_in_a_row_it_is_not_asked_again(odd: Order) -> None:
    policy = LastFirst(odd)
    broken = desk(policy, 20, quarantine_after=3)
    assert broken.order() == list(range(20))
    assert broken.account.quarantined is not None
    assert policy.calls < 20
    assert broken.victims() == list(range(19, -1, -1))


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_failure_over_who_leaves_falls_back_too(odd: Order) -> None:
    shaky = desk(LastFirst(lambda call: odd(call) if call == 6 else None))
    assert shaky.victims() == [3, 2, 1, 0]
    assert shaky.victims() == [0, 1, 2, 3]


def test_who_waits_can_leave_the_queue_whatever_its_order_is_now() -> None:
    shaky = desk(LastFirst(lambda call: raises(call) if call in (3, 8) else None), 3)
    for index in (1, 0, 2):
        shaky.arrive()
        shaky.waiting.remove(shaky.lives[index])
    assert sorted(shaky.order()) == [3, 4, 5]


def test_numbers_of_other_libraries_are_kept_as_pythons_own() -> None:
    np = pytest.importorskip("numpy")
    key = plain((np.float64(0.5), np.int64(3), True, ("a", math.inf)))
    assert key == (0.5, 3, 1, ("a", math.inf))
    assert [type(item) for item in key] == [float, int, int, tuple]


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_the_line_goes_on_and_every_answer_is_right(odd: Order, autojump_clock: MockClock) -> None:
    # Blocks for about two at a time: the others wait, and some are preempted.
    parts = make_parts(num_blocks=12, max_running=4)
    policy = LastFirst(lambda call: odd(call) if call % 3 == 0 else None)
    bound = Bound(name="odd", plugin="acme", component=policy)
    parts = msgspec.structs.replace(parts, stack=msgspec.structs.replace(parts.stack, policy=bound), ledger=Ledger())
    texts: dict[int, str] = {}

    async def one(i: int) -> None:
        texts[i] = (await ask(engine, range(i, i + 8), {"max_tokens": 20}))[0]

    async with line(parts) as engine:
        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(one, i)
        (cost,) = (each for each in engine.statistics().plugins if each.slot == "scheduler_policy")
    assert texts == {i: text_of(answer(range(i, i + 8), 20)) for i in range(8)}
    assert cost.errors > 0
