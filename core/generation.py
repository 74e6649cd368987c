"""One stack's share of the sampling state: its processors and its sampler, and the slots that are drawn by them.

Slots are shared by all generations, rows of a step are not: each generation changes and draws its own. So requests of
two stacks take part in one step, and none sees a processor of the other's. Runs on the compute thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..hooks.errors import RequestError, RequestFailed
from .chain import DrawRows, OnCall, Processor, select
from .containment import Ledger
from .draw import Draw
from .fused import FusedTail

if TYPE_CHECKING:
    from ..hooks.components import Bound
    from ..hooks.messages import Admit
    from .kernels.native.draw import Drawer


class Generation:
    """What a Stack is on the compute thread. See `SamplingState` for the arguments.

    Attributes:
        slots: who is drawn by it.
    """

    def __init__(
        self,
        chain: Sequence[Sequence[Bound]],
        sampler: Bound,
        *,
        num_slots: int,
        vocab_size: int,
        on_call: OnCall,
        ledger: Ledger,
        drawer: Drawer | None,
    ) -> None:
        self.slots: set[int] = set()
        self._processors = [Processor(bound, on_call, ledger) for group in chain for bound in group]
        self._sampler = Draw(sampler, on_call, ledger, vocab_size)
        self._fused = FusedTail(self._processors, self._sampler, num_slots, drawer) if drawer is not None else None
        self._before = self._processors if self._fused is None else self._fused.before
        self._after = self._processors[len(self._before) :]

    def admit(self, op: Admit, *, greedy: bool) -> RequestError | None:
        """Take a slot's parameters. Gives back why it cannot draw, if it cannot."""
        self.slots.add(op.slot)
        refusals = [processor.admit(op, params) for processor, params in zip(self._processors, op.chain, strict=True)]
        if self._fused is not None:
            self._fused.admit(op)
        if not greedy:
            refusals.append(self._sampler.admit(op))
        return next((refusal for refusal in refusals if refusal is not None), None)

    def release(self, slot: int, *, well: bool, greedy: bool) -> None:
        """Nobody owns *slot* any more. See `Processor.release`."""
        self.slots.discard(slot)
        if self._fused is not None:
            self._fused.release(slot)
        for processor in self._processors:
            processor.release(slot, well=well)
        if well and not greedy:
            self._sampler.release()

    def note(self, slot: int, token_id: int) -> None:
        """A token was drawn for *slot*."""
        if self._fused is not None:
            self._fused.note(slot, token_id)

    def quick(self, drawing: DrawRows) -> list[int]:
        """Its rows that the compiled draw can do."""
        return [] if self._fused is None else self._fused.rows(drawing, self.slots)

    def is_plain(self, slot: int, *, greedy: bool) -> bool:
        """Whether the compiled draw does all that the rows of an admitted *slot* need."""
        return self._fused is not None and self._fused.does_all(slot, greedy=greedy)

    def draw_plain(self, logits: Tensor, slots: array[int], positions: array[int]) -> list[int]:
        """A token for each row, all of plain slots; -1 where the largest logit is not finite."""
        assert self._fused is not None
        return self._fused.draw_all(logits, slots, positions)

    @property
    def wary(self) -> bool:
        """A stranger's processor will be called before the compiled draw."""
        return any(processor.slots and not processor.trusted for processor in self._before)

    def draw(self, drawing: DrawRows, quick: list[int]) -> dict[int, int]:
        """Row → token, of its own rows; those in error have none.

        Args:
            quick: of its rows, those that the compiled draw can do.
        """
        for processor in self._before:
            if processor.slots:
                processor.apply(drawing)
        chosen = self._draw_quick(drawing, [row for row in quick if row not in drawing.errors])
        if len(chosen) == len(drawing.slots):
            return chosen
        for processor in self._after:
            if processor.slots:
                processor.apply(drawing)
        rest = [
            row
            for row, slot in enumerate(drawing.slots)
            if slot in self.slots and row not in drawing.errors and row not in chosen
        ]
        greedy = [row for row in rest if drawing.greedy[row]]
        drawn = [row for row in rest if not drawing.greedy[row]]
        if greedy:
            chosen.update(zip(greedy, argmax(select(drawing.logits, greedy)[0]), strict=True))
        if drawn:
            chosen.update(self._sampler.draw(drawing, drawn))
        return chosen

    def _draw_quick(self, drawing: DrawRows, rows: list[int]) -> dict[int, int]:
        if self._fused is None or not rows:
            return {}
        drawn = self._fused.draw(drawing, rows)
        drawing.done |= frozenset(rows)
        for row, (token_id, largest) in drawn.items():
            if token_id < 0:
                drawing.errors[row] = not_finite(largest)
        return {row: token_id for row, (token_id, _) in drawn.items()}


def not_finite(largest: float) -> RequestFailed:
    return RequestFailed(f"the model's largest logit must be finite for a token to be drawn, found {largest}")


def argmax(logits: Tensor) -> list[int]:
    """The likeliest id of each row, the smallest of equals."""
    # NumPy's is several times as fast on a CPU.
    ids: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return ids
