"""The contract of the slot `sampler`: a pure function of logits and uniforms, and the distribution it promises."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...core.uniform import uniforms
from ..protocols import Context, SamplingContext
from .contract import Parametrized, ensure, skip
from .rows import MINUS_INF, Bench, Owner, owners, row_of, rows_of

LARGEST = 1 - 2.0**-53
"""The largest uniform."""
DEVIATIONS = 5.0
"""Standard deviations of the statistic beyond which a distribution counts as another: one good sampler in millions."""


class SamplerContract(Parametrized):
    """Called directly. One that has `admit` is admitted as a processor is.

    Attributes:
        vocab_size, num_slots: what it is built for.
        num_draws: draws that its distribution is judged by.
    """

    slot = "sampler"
    vocab_size: ClassVar[int] = 300
    num_slots: ClassVar[int] = 6
    num_draws: ClassVar[int] = 20_000

    def expected(self, logits: Tensor, params: Any) -> Tensor | None:
        """The probabilities it draws with, `[vocab_size]`; None: not known, so not compared. Override as needed."""
        return logits.double().softmax(-1)

    def context(self) -> Context:
        return Context(sampling=SamplingContext(vocab_size=self.vocab_size, num_slots=self.num_slots))

    def bench(self) -> Bench:
        """A fresh component, its slots empty."""
        return Bench(self.build(), self.decoded(), self.num_slots)

    def alone(self, owner: Owner, uniform: float) -> int:
        """What is drawn for *owner* with nobody else there."""
        bench = self.bench()
        bench.admit(0, owner)
        return bench.sample(row_of(owner, self.vocab_size)[None], torch.tensor([uniform], dtype=torch.float64), [0])[0]

    def any_owner(self) -> st.SearchStrategy[Owner]:
        """Owners with any of `params`."""
        return owners(len(self.decoded()), self.vocab_size)

    def company(self) -> st.SearchStrategy[dict[int, Owner]]:
        """Some slots, in any order, each with an owner."""
        return st.dictionaries(st.integers(0, self.num_slots - 1), self.any_owner(), min_size=1)

    def drawn(self, bench: Bench, each: dict[int, Owner], slots: list[int]) -> dict[int, int]:
        """Slot → what is drawn for it, with a uniform that depends on the owner alone."""
        numbers = torch.tensor([_uniform(each[slot]) for slot in slots], dtype=torch.float64)
        logits = rows_of([each[slot] for slot in slots], self.vocab_size)
        return dict(zip(slots, bench.sample(logits, numbers, slots), strict=True))

    def test_it_draws_one_token_of_the_vocabulary_for_each_row(self) -> None:
        def check(each: dict[int, Owner]) -> None:
            bench, slots = self.bench(), list(each)
            for slot, owner in each.items():
                bench.admit(slot, owner)
            logits = rows_of(list(each.values()), self.vocab_size)
            ids = bench.component.sample(logits, torch.full((len(slots),), 0.5).double(), bench.rows(slots))
            ensure(isinstance(ids, Tensor), f"sample must return a tensor, found {type(ids).__name__}")
            found = (list(ids.shape), ids.dtype)
            ensure(found == ([len(slots)], torch.int64), f"sample must return [{len(slots)}] int64, found {found}")
            inside = bool(((ids >= 0) & (ids < self.vocab_size)).all())
            ensure(inside, f"ids must lie below vocab_size ({self.vocab_size}), found {ids.tolist()}")

        self.for_all(self.company(), check=check)

    def test_the_same_numbers_draw_the_same_tokens(self) -> None:
        """All randomness is in the uniforms; a generator of its own would make a seed mean nothing."""

        def check(owner: Owner, uniform: float) -> None:
            first, second = self.alone(owner, uniform), self.alone(owner, uniform)
            ensure(first == second, f"equal logits and uniforms must draw the same token, found {first} and {second}")

        self.for_all(self.any_owner(), _numbers(), check=check)

    def test_its_draws_have_the_distribution_it_promises(self) -> None:
        """Pearson's chi-square over bins of at least ten expected draws; see `expected`."""
        judged = 0
        for params, decoded in enumerate(self.decoded()):
            for seed in (1, 4, 5, 7):
                owner = Owner(params=params, seed=seed)
                row = row_of(owner, self.vocab_size)
                expected = self.expected(row.clone(), decoded)
                if expected is not None:
                    self._judge(owner, row, expected)
                    judged += 1
        if not judged:
            skip("override expected(logits, params) to have its distribution compared")

    def test_what_is_ruled_out_is_never_drawn(self) -> None:
        """Not with the smallest and the largest uniform either, nor at the ends of the vocabulary."""

        def check(owner: Owner, uniform: float, allowed: list[int]) -> None:
            bench = self.bench()
            bench.admit(0, owner)
            row = torch.full((1, self.vocab_size), MINUS_INF)
            row[0, allowed] = row_of(owner, self.vocab_size)[allowed].clamp(min=-50)
            drawn = bench.sample(row, torch.tensor([uniform], dtype=torch.float64), [0])[0]
            ensure(drawn in allowed, f"a token at -inf must not be drawn, found {drawn} with the uniform {uniform}")

        some = st.lists(st.integers(0, self.vocab_size - 1), min_size=1, max_size=3, unique=True)
        self.for_all(self.any_owner(), _numbers(), some, check=check)

    def test_a_row_is_the_same_alone_and_in_company(self) -> None:
        def check(each: dict[int, Owner]) -> None:
            bench = self.bench()
            for slot, owner in each.items():
                bench.admit(slot, owner)
            for slot, token_id in self.drawn(bench, each, list(each)).items():
                alone = self.alone(each[slot], _uniform(each[slot]))
                ensure(token_id == alone, f"a row must draw the same token in company, found {token_id}, not {alone}")

        self.for_all(self.company(), check=check)

    def test_the_order_of_rows_does_not_matter(self) -> None:
        def check(each: dict[int, Owner], random: Any) -> None:
            found = []
            slots = list(each)
            for _ in range(2):
                bench = self.bench()
                for slot in each:
                    bench.admit(slot, each[slot])
                found.append(self.drawn(bench, each, slots))
                random.shuffle(slots)
            ensure(found[0] == found[1], f"a row must draw the same token wherever it stands, found {found}")

        self.for_all(self.company(), st.randoms(use_true_random=False), check=check)

    def test_a_new_owner_finds_nothing_of_the_last_one(self) -> None:
        def check(last: Owner, new: Owner) -> None:
            bench = self.bench()
            bench.admit(0, last)
            self.drawn(bench, {0: last}, [0])
            bench.admit(0, new)
            found, alone = self.drawn(bench, {0: new}, [0])[0], self.alone(new, _uniform(new))
            ensure(found == alone, f"a slot's new owner must draw {alone} as it would in a fresh slot, found {found}")

        self.for_all(self.any_owner(), self.any_owner(), check=check)

    def test_it_leaves_what_it_is_given_as_it_is(self) -> None:
        """But it may rule tokens out in place. The engine looks once more whether what was drawn may be drawn."""

        def check(owner: Owner) -> None:
            bench = self.bench()
            bench.admit(0, owner)
            row, numbers = row_of(owner, self.vocab_size)[None], torch.tensor([0.3], dtype=torch.float64)
            logits, given, rows = row.clone(), numbers.clone(), bench.rows([0])
            drawn = bench.component.sample(logits, given, rows)
            kept = ((logits == row) | (logits == MINUS_INF)).all() and (logits == row)[0, drawn].all()
            ensure(kept, "sample must not change logits but to rule tokens out, and not the one it draws")
            ensure(torch.equal(given, numbers), "sample must not write to the uniforms")
            ensure(rows.slots == [0] and rows.num_outputs == [len(owner.output)], "sample must leave Rows as it is")

        self.for_all(self.any_owner(), check=check)

    def _judge(self, owner: Owner, row: Tensor, expected: Tensor) -> None:
        bench = self.bench()
        bench.admit(0, owner)
        numbers = torch.from_numpy(uniforms([owner.seed] * self.num_draws, [0] * self.num_draws, range(self.num_draws)))
        counts = torch.zeros(self.vocab_size).double()
        for start in range(0, self.num_draws, 2000):
            part = numbers[start : start + 2000]
            ids = bench.component.sample(row.repeat(len(part), 1), part, bench.rows([0] * len(part)))
            counts += ids.bincount(minlength=self.vocab_size)
        statistic, freedom = _chi_square(counts, expected.double() * self.num_draws)
        far = (statistic - freedom) / math.sqrt(2 * max(freedom, 1))
        ensure(
            far <= DEVIATIONS,
            f"with params {self.params[owner.params]} the draws must follow expected(): chi-square is {statistic:.1f} "
            f"at {freedom} degrees of freedom",
        )


def _numbers() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, LARGEST]) | st.floats(0, LARGEST)


def _uniform(owner: Owner) -> float:
    return float(uniforms([owner.seed], [0], [len(owner.output)])[0])


def _chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Pearson's statistic, tokens that are expected fewer than ten times taken together, and its degrees of freedom."""
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    often = int((expected >= 10).sum())
    rest = float(expected[often:].sum())
    observed = [*counts[:often].tolist(), float(counts[often:].sum())]
    wanted = [*expected[:often].tolist(), rest]
    if rest < 1e-6:
        if observed[-1]:
            return math.inf, 1
        observed, wanted = observed[:-1], wanted[:-1]
    return sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True)), len(wanted) - 1
