"""Slots of several stacks in one sampling state: each row is changed and drawn by its own stack's components alone."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from headrace.core.containment import Ledger
from headrace.core.kernels.native import abi, dialect
from headrace.core.kernels.native.draw import Drawer
from headrace.core.sampling import SamplingState
from headrace.hooks.components import Bound
from headrace.hooks.messages import Admit, Fork, Release
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Context, SamplingContext
from headrace.hooks.resolve import NoParams
from headrace.hooks.stack import Stack
from headrace.plugins import categorical, temperature, top_k

VOCAB_SIZE = 40
NUM_SLOTS = 6
CONTEXT = Context(sampling=SamplingContext(vocab_size=VOCAB_SIZE, num_slots=NUM_SLOTS))


class Only:
    """A logits processor that leaves one token."""

    phase = "mask"

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.slots: list[int] = []

    def admit(self, slot: int, params: object, admitted: Admit) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        self.slots += rows.slots
        kept = logits[:, self.token_id].clone()
        logits.fill_(-torch.inf)
        logits[:, self.token_id] = kept
        return logits


class Raising(Only):
    def apply(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        logits.fill_(torch.nan)
        raise ZeroDivisionError("on purpose")


def mine(name: str, component: object, revision: int, distribution: str = "headrace 0") -> Bound:
    return Bound(name=name, plugin=name, component=component, distribution=distribution, revision=revision)


def stack(revision: int, *processors: object, sampler: object = None) -> Stack:
    """*processors*, and at the end what the compiled draw can do."""
    drawn = categorical.Categorical(CONTEXT, None) if sampler is None else sampler
    return Stack(
        tokenizer=mine("tokenizer", None, 0),
        chat_template=mine("template", None, revision),
        policy=mine("policy", None, revision),
        chain=(
            ("mask", tuple(mine(f"only-{i}", each, revision, "acme 1") for i, each in enumerate(processors))),
            ("temperature", (mine("temperature", temperature.Temperature(CONTEXT, None), revision),)),
            ("truncate", (mine("top-k", top_k.TopK(CONTEXT, None), revision),)),
        ),
        sampler=mine("categorical", drawn, revision),
        observers=(),
        fingerprint=str(revision),
        revision=revision,
    )


def admit(slot: int, of: Stack, *, seed: int = 0, heat: float = 1.0, k: int = 0) -> Admit:
    masks = (NoParams(),) * len(of.chain[0][1])
    warm = None if heat == 1.0 else temperature.Params(value=heat)
    return Admit(
        slot=slot,
        choice=0,
        params=SamplingParams(seed=seed, temperature=heat, top_k=k),
        chain=(*masks, warm, top_k.Params(k=k) if k else None),
        end_ids=frozenset(),
        prompt_ids=array("i", [1]),
        output_ids=array("i"),
        stack=of,
    )


@pytest.fixture(params=["torch", "compiled"])
def drawer(request: pytest.FixtureRequest) -> Iterator[Drawer | None]:
    """What draws the ends of chains."""
    spoken = dialect()
    if request.param == "torch":
        yield None
    elif spoken is None:
        pytest.skip("the kernels were not compiled: there is no C++ compiler")
    else:
        lib = abi.library()
        assert lib is not None
        engine = lib.hr_create(ctypes.byref(abi.Program()), spoken.encode(), 1, 100)
        yield Drawer(engine)
        lib.hr_destroy(engine)


def state_of(first: Stack, drawer: Drawer | None, ledger: Ledger | None = None) -> SamplingState:
    return SamplingState(
        num_slots=NUM_SLOTS,
        vocab_size=VOCAB_SIZE,
        chain=[group for _, group in first.chain],
        sampler=first.sampler,
        ledger=ledger,
        drawer=drawer,
    )


def logits(seed: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def draw(state: SamplingState, rows: torch.Tensor, slots: Sequence[int], position: int = 0) -> list[int]:
    drawn = state.draw(rows.clone(), list(slots), [position] * len(slots))
    assert drawn.errors == {}
    return drawn.token_ids


def test_each_row_is_changed_by_its_own_stack(drawer: Drawer | None) -> None:
    first, second = stack(0, Only(7)), stack(1, Only(9))
    state = state_of(first, drawer)
    state.apply_ops((admit(0, first), admit(1, second), admit(2, first), admit(3, second, heat=0)))
    assert draw(state, logits(1, 4), [0, 1, 2, 3]) == [7, 9, 7, 9]
    (only,) = second.chain[0][1]
    assert only.component.slots == [1, 3]


def test_rows_of_two_stacks_draw_together_what_each_stack_draws_alone(drawer: Drawer | None) -> None:
    stacks = [stack(0), stack(1, sampler=First()), stack(2)]
    ops = [
        admit(slot, stacks[slot % 3], seed=slot, heat=(0.0, 0.7, 1.0)[slot // 2], k=5 * (slot % 2)) for slot in range(6)
    ]
    together = state_of(stacks[0], drawer)
    together.apply_ops(tuple(ops))
    alone = [state_of(stacks[0], drawer) for _ in ops]
    for state, op in zip(alone, ops, strict=True):
        state.apply_ops((op,))
    for position in range(30):
        rows = logits(position, 6)
        expected = [draw(state, rows[slot : slot + 1], [slot], position)[0] for slot, state in enumerate(alone)]
        order = [(slot + position) % 6 for slot in range(6)]
        assert draw(together, rows[order], order, position) == [expected[slot] for slot in order]


class First:
    """A sampler that takes the first token that is not ruled out."""

    def sample(self, logits: torch.Tensor, uniforms: torch.Tensor, rows: Any) -> torch.Tensor:
        return logits.isfinite().to(torch.int8).argmax(-1)


def test_a_processor_that_fails_fails_the_rows_of_its_own_stack_alone(drawer: Drawer | None) -> None:
    first, second = stack(0), stack(1, Raising(0))
    rows = logits(3, 4)
    alone = state_of(first, drawer)
    alone.apply_ops((admit(0, first, seed=1), admit(2, first, seed=2)))
    expected = draw(alone, rows[[0, 2]], [0, 2])
    state = state_of(first, drawer)
    state.apply_ops((admit(0, first, seed=1), admit(1, second), admit(2, first, seed=2), admit(3, second)))
    drawn = state.draw(rows.clone(), [0, 1, 2, 3], [0] * 4)
    assert sorted(drawn.errors) == [1, 3]
    assert [drawn.token_ids[0], drawn.token_ids[2]] == expected


def test_a_fork_stays_on_the_stack_of_its_source(drawer: Drawer | None) -> None:
    first, second = stack(0, Only(7)), stack(1, Only(9))
    state = state_of(first, drawer)
    state.apply_ops((admit(0, first), admit(1, second), Fork(source=0, slot=2, choice=1)))
    state.apply_ops((Fork(source=1, slot=3, choice=1),))
    assert draw(state, logits(1, 4), [0, 1, 2, 3]) == [7, 9, 7, 9]


def revisions(state: SamplingState) -> list[int]:
    return sorted(state._generations)


def test_a_generation_goes_with_its_last_slot_and_the_newest_stays(drawer: Drawer | None) -> None:
    stacks = [stack(revision, Only(revision)) for revision in range(3)]
    state = state_of(stacks[0], drawer)
    state.apply_ops((admit(0, stacks[0]), admit(1, stacks[0]), admit(2, stacks[1])))
    assert revisions(state) == [0, 1]
    state.apply_ops((Release(slot=0), admit(0, stacks[2])))
    assert revisions(state) == [0, 1, 2]
    state.apply_ops((Release(slot=1), Release(slot=2)))
    assert revisions(state) == [2]
    state.apply_ops((Release(slot=0),))
    assert revisions(state) == [2]


def test_a_request_of_an_old_stack_that_starts_late_still_gets_it(drawer: Drawer | None) -> None:
    stacks = [stack(revision, Only(revision + 20)) for revision in range(2)]
    state = state_of(stacks[0], drawer)
    state.apply_ops((admit(0, stacks[1]),))
    assert revisions(state) == [1]
    state.apply_ops((admit(1, stacks[0]),))
    assert draw(state, logits(5, 2), [0, 1]) == [21, 20]
    state.apply_ops((Release(slot=1),))
    assert revisions(state) == [1]


def test_a_slot_that_changes_stacks_keeps_nothing_of_the_old_one(drawer: Drawer | None) -> None:
    stacks = [stack(revision, Only(revision)) for revision in range(20)]
    state = state_of(stacks[0], drawer)
    for revision, each in enumerate(stacks):
        state.apply_ops((admit(0, each),))
        assert draw(state, logits(revision, 1), [0]) == [revision]
        state.apply_ops((Release(slot=0),))
    assert revisions(state) == [19]


def test_the_costs_of_two_versions_are_counted_apart_and_shown_together() -> None:
    ledger = Ledger()
    first, second = stack(0, Only(1)), stack(1, Raising(2))
    state = state_of(first, None, ledger)
    state.apply_ops((admit(0, first), admit(1, second)))
    state.draw(logits(1, 2), [0, 1], [0, 0])
    (old,), (new,) = first.chain[0][1], second.chain[0][1]
    assert (ledger.account("logits_processor", old).errors, ledger.account("logits_processor", new).errors) == (0, 1)
    (shown,) = [cost for cost in ledger.costs() if cost.plugin == "only-0"]
    assert shown.errors == 1
