"""Slots, histories and rows for components of the sampling chain, called as the compute thread calls them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NoReturn
from zlib import crc32

import torch
from hypothesis import strategies as st
from msgspec import Struct
from torch import Tensor

from ...core.history import TokenHistory
from ...core.uniform import uniforms
from ..messages import Admit
from ..params import SamplingParams
from ..protocols import Rows

MINUS_INF = float("-inf")


class Owner(Struct, frozen=True, kw_only=True):
    """Who owns a slot, and the logits of its row.

    Attributes:
        params: index into the contract's parameters.
        seed: of the row's logits.
    """

    params: int
    seed: int
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    end_ids: frozenset[int] = frozenset()


def owners(num_params: int, vocab_size: int, *, max_output: int = 12) -> st.SearchStrategy[Owner]:
    """Owners of a slot, with any of the parameters and any past."""

    # The tokens come from the seed: to draw each by itself would take most of the time.
    def made(params: int, seed: int, num_output: int) -> Owner:
        random = Random(seed)
        return Owner(
            params=params,
            seed=seed,
            prompt=tuple(random.choices(range(vocab_size), k=random.randint(1, 8))),
            output=tuple(random.choices(range(vocab_size), k=num_output)),
            end_ids=frozenset(random.choices(range(vocab_size), k=seed % 3)),
        )

    return st.builds(made, st.integers(0, num_params - 1), st.integers(0, 2**16), st.integers(0, max_output))


def row_of(owner: Owner, vocab_size: int) -> Tensor:
    """Random logits `[vocab_size]`; some rows are flat, some steep, and some have tokens that are ruled out."""
    generator = torch.Generator().manual_seed(owner.seed)
    row = torch.randn(vocab_size, generator=generator) * (0.5, 3.0, 12.0)[owner.seed % 3]
    if owner.seed % 4 == 0:
        row[torch.rand(vocab_size, generator=generator) < 0.25] = MINUS_INF
        row[owner.seed % vocab_size] = 1.0
    return row


def rows_of(each: Sequence[Owner], vocab_size: int) -> Tensor:
    """`[len(each), vocab_size]`."""
    return torch.stack([row_of(owner, vocab_size) for owner in each])


class Bench:
    """A component and the slots it serves.

    Args:
        params: the contract's, decoded; `Owner.params` says which.
    """

    def __init__(self, component: Any, params: Sequence[Struct], num_slots: int) -> None:
        self.component = component
        self.history = TokenHistory(num_slots)
        self._params = params
        self._owners: dict[int, Owner] = {}
        self._wants: set[int] = set()

    def admit(self, slot: int, owner: Owner) -> Any:
        """Give *slot* to *owner*; what the component's `admit` returned."""
        prompt, output = array("i", owner.prompt), array("i", owner.output)
        self.history.admit(slot, prompt, output)
        self._owners[slot] = owner
        self._wants.discard(slot)
        admitted = Admit(
            slot=slot,
            choice=0,
            params=SamplingParams(seed=owner.seed),
            chain=(),
            end_ids=owner.end_ids,
            prompt_ids=prompt,
            output_ids=output,
        )
        # A sampler need not look at who owns a slot.
        admit = getattr(self.component, "admit", None)
        wants = True if admit is None else admit(slot, self._params[owner.params], admitted)
        if wants is not False:
            self._wants.add(slot)
        return wants

    def release(self, slot: int) -> None:
        """The owner of *slot* has ended. The component is not told."""
        self.history.release(slot)
        self._wants.discard(slot)
        del self._owners[slot]

    def append(self, slot: int, token_id: int) -> None:
        """A token was drawn for *slot*."""
        self.history.append(slot, token_id)

    def rows(self, slots: Sequence[int]) -> Rows:
        """What the component is told of a row each of *slots*."""
        counts = [len(self.history.output(slot)) for slot in slots]
        seeds = [self._owners[slot].seed for slot in slots]
        return Rows(list(slots), counts, self.history, own_numbers(seeds, counts))

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """What a processor makes of *logits*, a row for each of *slots*; of those that it does not want, nothing."""
        result = logits.clone()
        wanted = [row for row, slot in enumerate(slots) if slot in self._wants]
        if wanted:
            result[wanted] = self.component.apply(logits[wanted], self.rows([slots[row] for row in wanted]))
        return result

    def sample(self, logits: Tensor, uniforms: Tensor, slots: Sequence[int]) -> list[int]:
        """What a sampler draws, a token for each of *slots*."""
        ids: list[int] = self.component.sample(logits.clone(), uniforms.clone(), self.rows(slots)).tolist()
        return ids


def own_numbers(seeds: Sequence[int], counts: Sequence[int]) -> Callable[[str], Tensor]:
    """What `Rows.uniforms` gives: other numbers for each stream."""

    def numbers(stream: str) -> Tensor:
        mixed = [seed ^ crc32(stream.encode()) for seed in seeds]
        return torch.from_numpy(uniforms(mixed, [1] * len(mixed), counts))

    return numbers


class Closed:
    """A history that may not be read. Implements `protocols.History`."""

    def _refuse(self, slot: int) -> NoReturn:
        raise LookupError("it says `speculative`, so it must never read Rows.history")

    prompt = output = output_counts = seen = _refuse


def same(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether two rows of logits rule out the same tokens, and are equal but for rounding elsewhere."""
    if found.shape != wanted.shape or not torch.equal(found == MINUS_INF, wanted == MINUS_INF):
        return False
    return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=False)
