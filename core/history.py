"""The tokens of each slot, as logits processors may see them.

Kept on the host. Tallies are made when a processor first asks for them and kept up to date from then on, so that a
request without penalties costs one append a token.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..hooks.protocols import History

IntArray = npt.NDArray[np.int64]


class Growing:
    """A row of numbers that grows at its end, in amortised constant time."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._buffer = values
        self._length = len(values)

    def append(self, value: float) -> None:
        if self._length == len(self._buffer):
            # A new buffer, not a resized one: tensors that were handed out may still look at the old one.
            self._buffer = np.concatenate([self._buffer, np.zeros(max(16, self._length), self._buffer.dtype)])
        self._buffer[self._length] = value
        self._length += 1

    def increment(self, index: int) -> None:
        self._buffer[index] += 1

    def view(self) -> npt.NDArray[Any]:
        return self._buffer[: self._length]


class Tally:
    """Distinct token ids, and how often each came."""

    __slots__ = ("_index", "counts", "ids")

    def __init__(self, token_ids: IntArray) -> None:
        ids, counts = np.unique(token_ids, return_counts=True)
        self.ids = Growing(ids)
        self.counts = Growing(counts.astype(np.float32))
        self._index = {int(token_id): index for index, token_id in enumerate(ids)}

    def add(self, token_id: int) -> None:
        index = self._index.get(token_id)
        if index is None:
            self._index[token_id] = len(self._index)
            self.ids.append(token_id)
            self.counts.append(1)
        else:
            self.counts.increment(index)


class SlotTokens:
    """Prompt and output of the sequence that owns a slot."""

    __slots__ = ("_drawn", "_new", "_output", "_seen", "append", "prompt")

    def __init__(self, prompt: IntArray, output: IntArray) -> None:
        self.prompt = prompt
        self._new: list[int] = []
        """Drawn, and not asked for yet."""
        self.append = self._new.append
        self._output = Growing(output)
        self._drawn: Tally | None = None
        self._seen: Tally | None = None

    def output(self) -> IntArray:
        self._take_in()
        return self._output.view()

    def drawn(self) -> Tally:
        self._take_in()
        if self._drawn is None:
            self._drawn = Tally(self._output.view())
        return self._drawn

    def seen(self) -> Tally:
        self._take_in()
        if self._seen is None:
            self._seen = Tally(np.concatenate([self.prompt, self._output.view()]))
        return self._seen

    def _take_in(self) -> None:
        for token_id in self._new:
            self._output.append(token_id)
            for tally in (self._drawn, self._seen):
                if tally is not None:
                    tally.add(token_id)
        self._new.clear()


class TokenHistory:
    """`hooks.protocols.History`, and the few ways to change it. Tensors it gives hold until the next draw."""

    def __init__(self, num_slots: int, device: str = "cpu") -> None:
        self._slots: list[SlotTokens | None] = [None] * num_slots
        self._device = device

    def admit(self, slot: int, prompt_ids: array[int], output_ids: array[int]) -> None:
        """Forget what *slot* held and start from these tokens."""
        self._slots[slot] = SlotTokens(np.array(prompt_ids, dtype=np.int64), np.array(output_ids, dtype=np.int64))

    def release(self, slot: int) -> None:
        """Forget what *slot* held."""
        self._slots[slot] = None

    def append(self, slot: int, token_id: int) -> None:
        """Add a token that was drawn."""
        self._tokens(slot).append(token_id)

    def prompt(self, slot: int) -> Tensor:
        return self._tensor(self._tokens(slot).prompt)

    def output(self, slot: int) -> Tensor:
        return self._tensor(self._tokens(slot).output())

    def output_counts(self, slot: int) -> tuple[Tensor, Tensor]:
        drawn = self._tokens(slot).drawn()
        return self._tensor(drawn.ids.view()), self._tensor(drawn.counts.view())

    def seen(self, slot: int) -> Tensor:
        return self._tensor(self._tokens(slot).seen().ids.view())

    def _tokens(self, slot: int) -> SlotTokens:
        tokens = self._slots[slot]
        assert tokens is not None, f"slot {slot} is not owned"
        return tokens

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


class OwnHistory:
    """`hooks.protocols.History` for a stranger: the slots of one call and no others, as copies of its own."""

    def __init__(self, history: History, slots: list[int]) -> None:
        self._history = history
        self._slots = frozenset(slots)

    def prompt(self, slot: int) -> Tensor:
        return self._history.prompt(self._own(slot)).clone()

    def output(self, slot: int) -> Tensor:
        return self._history.output(self._own(slot)).clone()

    def output_counts(self, slot: int) -> tuple[Tensor, Tensor]:
        ids, counts = self._history.output_counts(self._own(slot))
        return ids.clone(), counts.clone()

    def seen(self, slot: int) -> Tensor:
        return self._history.seen(self._own(slot)).clone()

    def _own(self, slot: int) -> int:
        if slot not in self._slots:
            raise ValueError(f"the slot must be one of this call's, {sorted(self._slots)}, got {slot}")
        return slot
