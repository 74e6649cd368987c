"""The contract of the slot `logits_processor`: each row by itself, from its parameters and its past alone."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..errors import BadRequest
from ..protocols import PHASES, Context, Rows, SamplingContext
from .contract import Parametrized, ensure, skip
from .rows import MINUS_INF, Bench, Closed, Owner, own_numbers, owners, row_of, rows_of, same


class LogitsProcessorContract(Parametrized):
    """Called directly, a gathered copy of its rows at a time.

    Attributes:
        vocab_size, num_slots: what it is built for.
        tolerance: relative and absolute difference that rounding may make between a row alone and one in company.
    """

    slot = "logits_processor"
    vocab_size: ClassVar[int] = 67
    num_slots: ClassVar[int] = 6
    tolerance: ClassVar[float] = 1e-5

    def context(self) -> Context:
        return Context(sampling=SamplingContext(vocab_size=self.vocab_size, num_slots=self.num_slots))

    def bench(self) -> Bench:
        """A fresh component, its slots empty."""
        return Bench(self.build(), self.decoded(), self.num_slots)

    def alone(self, owner: Owner) -> Tensor:
        """What *owner*'s row comes to with nobody else there, `[vocab_size]`."""
        bench = self.bench()
        bench.admit(0, owner)
        return bench.apply(row_of(owner, self.vocab_size)[None], [0])[0]

    def any_owner(self) -> st.SearchStrategy[Owner]:
        """Owners with any of `params`."""
        return owners(len(self.decoded()), self.vocab_size)

    def company(self) -> st.SearchStrategy[dict[int, Owner]]:
        """Some slots, in any order, each with an owner."""
        return st.dictionaries(st.integers(0, self.num_slots - 1), self.any_owner(), min_size=1)

    def compare(self, found: Tensor, wanted: Tensor, what: str) -> None:
        """Raise unless two rows are the same."""
        ensure(same(found, wanted, self.tolerance), f"{what}, but it became {_shown(found)} and not {_shown(wanted)}")

    def test_it_declares_a_phase(self) -> None:
        phase = self.build().phase
        ensure(phase in PHASES, f"phase must be one of {', '.join(PHASES)}, found {phase!r}")

    def test_check_refuses_with_bad_request_only(self) -> None:
        """And not the parameters of the contract."""
        component = self.build()
        for params in self.decoded() if hasattr(component, "check") else ():
            try:
                component.check(params)
            except BadRequest as error:
                ensure(False, f"check must let the contract's own parameters pass, it refused {params}: {error}")

    def test_admit_says_whether_it_is_needed(self) -> None:
        def check(owner: Owner) -> None:
            wants = self.bench().admit(0, owner)
            ensure(isinstance(wants, bool), f"admit must return True or False, found {wants!r}")

        self.for_all(self.any_owner(), check=check)

    def test_it_gives_back_rows_of_the_same_kind(self) -> None:
        """Shape, dtype and device."""

        def check(each: dict[int, Owner]) -> None:
            bench, logits = self.bench(), rows_of(list(each.values()), self.vocab_size)
            slots = [slot for slot, owner in each.items() if bench.admit(slot, owner)]
            logits = logits[: len(slots)]
            result = bench.component.apply(logits.clone(), bench.rows(slots)) if slots else logits
            ensure(isinstance(result, Tensor), f"apply must return a tensor, found {type(result).__name__}")
            kinds = [(list(t.shape), t.dtype, t.device) for t in (result, logits)]
            ensure(kinds[0] == kinds[1], f"apply must return {kinds[1]}, found {kinds[0]}")

        self.for_all(self.company(), check=check)

    def test_a_row_is_the_same_alone_and_in_company(self) -> None:
        def check(each: dict[int, Owner]) -> None:
            bench = self.bench()
            for slot, owner in each.items():
                bench.admit(slot, owner)
            result = bench.apply(rows_of(list(each.values()), self.vocab_size), list(each))
            for row, owner in zip(result, each.values(), strict=True):
                self.compare(row, self.alone(owner), f"the row of {owner} must be the same alone and in company")

        self.for_all(self.company(), check=check)

    def test_the_order_of_rows_does_not_matter(self) -> None:
        def check(each: dict[int, Owner], random: Any) -> None:
            bench, slots = self.bench(), list(each)
            for slot in slots:
                bench.admit(slot, each[slot])
            first = dict(
                zip(slots, bench.apply(rows_of([each[s] for s in slots], self.vocab_size), slots), strict=True)
            )
            random.shuffle(slots)
            second = bench.apply(rows_of([each[s] for s in slots], self.vocab_size), slots)
            for slot, row in zip(slots, second, strict=True):
                self.compare(row, first[slot], "a row must be the same wherever it stands in the batch")

        self.for_all(self.company(), st.randoms(use_true_random=False), check=check)

    def test_a_new_owner_finds_nothing_of_the_last_one(self) -> None:
        """`admit` overwrites everything: nobody says when an owner goes."""

        def check(last: Owner, new: Owner) -> None:
            bench = self.bench()
            bench.admit(0, last)
            bench.apply(row_of(last, self.vocab_size)[None], [0])
            bench.admit(0, new)
            found = bench.apply(row_of(new, self.vocab_size)[None], [0])[0]
            self.compare(found, self.alone(new), "a slot's new owner must find nothing of the last one")

        self.for_all(self.any_owner(), self.any_owner(), check=check)

    def test_the_others_go_on_when_one_has_finished(self) -> None:
        """The history of a slot that nobody owns cannot be read."""

        def check(gone: Owner, stays: Owner) -> None:
            bench = self.bench()
            for slot, owner in enumerate((gone, stays)):
                bench.admit(slot, owner)
            bench.apply(rows_of([gone, stays], self.vocab_size), [0, 1])
            bench.release(0)
            found = bench.apply(row_of(stays, self.vocab_size)[None], [1])[0]
            self.compare(found, self.alone(stays), "a row must not change when another request ends")

        self.for_all(self.any_owner(), self.any_owner(), check=check)

    def test_a_preempted_request_goes_on_as_if_nothing_had_happened(self) -> None:
        """It is admitted again, to another slot, with what it had drawn: state must follow from `Admit` and history."""

        def check(owner: Owner, drawn: list[int], before: int) -> None:
            stayed, left = self.bench(), self.bench()
            stayed.admit(0, owner)
            for step, token_id in enumerate(drawn):
                stayed.apply(row_of(owner, self.vocab_size)[None], [0])
                stayed.append(0, token_id)
                if step == min(before, len(drawn) - 1):
                    output = (*owner.output, *drawn[: step + 1])
                    left.admit(3, _changed(owner, output))
                elif step > before:
                    left.apply(row_of(owner, self.vocab_size)[None], [3])
                    left.append(3, token_id)
            found = left.apply(row_of(owner, self.vocab_size)[None], [3])[0]
            wanted = stayed.apply(row_of(owner, self.vocab_size)[None], [0])[0]
            self.compare(found, wanted, "a request that was preempted must go on as if it had stayed")

        drawn = st.lists(st.integers(0, self.vocab_size - 1), min_size=1, max_size=6)
        self.for_all(self.any_owner(), drawn, st.integers(0, 5), check=check)

    def test_apply_alone_changes_nothing_for_the_next_call(self) -> None:
        def check(owner: Owner) -> None:
            bench, row = self.bench(), row_of(owner, self.vocab_size)[None]
            bench.admit(0, owner)
            first = bench.apply(row, [0])[0].clone()
            self.compare(bench.apply(row, [0])[0], first, "equal rows with an equal past must come to the same")

        self.for_all(self.any_owner(), check=check)

    def test_it_touches_no_rows_but_its_own(self) -> None:
        """Its rows may be a view of the batch, and their lists belong to the engine."""

        def check(each: dict[int, Owner]) -> None:
            bench = self.bench()
            slots = [slot for slot, owner in each.items() if bench.admit(slot, owner)]
            if not slots:
                return
            batch = torch.full((len(slots) + 2, self.vocab_size), 0.5)
            batch[1:-1] = rows_of([each[slot] for slot in slots], self.vocab_size)
            rows = bench.rows(slots)
            num_outputs = list(rows.num_outputs)
            bench.component.apply(batch[1:-1], rows)
            ensure((batch[[0, -1]] == 0.5).all(), "apply must write to no row but those it was given")
            ensure(rows.slots == slots and rows.num_outputs == num_outputs, "apply must leave Rows as it is")
            for slot in slots:
                output = bench.history.output(slot).tolist()
                ensure(output == list(each[slot].output), "apply must not write to the history")

        self.for_all(self.company(), check=check)

    def test_every_row_keeps_a_largest_logit_that_is_finite(self) -> None:
        def check(owner: Owner) -> None:
            self._ensure_drawable(owner, row_of(owner, self.vocab_size))

        self.for_all(self.any_owner(), check=check)

    def test_extreme_rows_stay_drawable(self) -> None:
        """Very large, very small, all equal; and but one token left, which only a mask may take."""
        ramp = torch.arange(self.vocab_size) - self.vocab_size / 2
        rows = [ramp * 1e4, ramp * 1e-6, torch.zeros(self.vocab_size), torch.full((self.vocab_size,), -1e4)]
        if self.build().phase != "mask":
            single = torch.full((self.vocab_size,), MINUS_INF)
            single[self.vocab_size // 3] = -50.0
            rows.append(single)
        for row in rows:
            for params in range(len(self.decoded())):
                self._ensure_drawable(Owner(params=params, seed=1, output=(1, 1, 2)), row)

    def test_what_is_ruled_out_stays_ruled_out(self) -> None:
        """Else a grammar, or a list of bad words, would be undone."""

        def check(owner: Owner) -> None:
            row = row_of(owner, self.vocab_size)
            row[::3] = MINUS_INF
            bench = self.bench()
            bench.admit(0, owner)
            found = bench.apply(row[None], [0])[0]
            ensure((found[::3] == MINUS_INF).all(), "a token at -inf must stay at -inf")

        self.for_all(self.any_owner(), check=check)

    def test_guessed_rows_are_served_without_the_history(self) -> None:
        """Only of processors that say `speculative`: a slot may have several rows, each after one more token."""
        if not getattr(self.build(), "speculative", False):
            skip("it does not say speculative = True, so requests that use it are not speculated for")

        def check(owner: Owner, num_rows: int) -> None:
            bench = self.bench()
            if not bench.admit(0, owner):
                return
            logits = row_of(owner, self.vocab_size).repeat(num_rows, 1)
            counts = [len(owner.output) + row for row in range(num_rows)]
            numbers = own_numbers([owner.seed] * num_rows, counts)
            found = bench.component.apply(logits.clone(), Rows([0] * num_rows, counts, Closed(), numbers))
            for row, count in enumerate(counts):
                alone = Rows([0], [count], Closed(), own_numbers([owner.seed], [count]))
                wanted = bench.component.apply(logits[:1].clone(), alone)[0]
                self.compare(found[row], wanted, "a guessed row must come to what it does alone")

        self.for_all(self.any_owner(), st.integers(1, 5), check=check)

    def _ensure_drawable(self, owner: Owner, row: Tensor) -> None:
        bench = self.bench()
        bench.admit(0, owner)
        largest = bench.apply(row[None], [0])[0].amax().item()
        params = self.params[owner.params]
        ensure(math.isfinite(largest), f"the largest logit must stay finite, found {largest} with params {params}")


def _changed(owner: Owner, output: tuple[int, ...]) -> Owner:
    return Owner(params=owner.params, seed=owner.seed, prompt=owner.prompt, output=output, end_ids=owner.end_ids)


def _shown(row: Tensor) -> str:
    kept = int((row > MINUS_INF).sum())
    return f"{row[:4].tolist()}… with {kept} tokens left"
