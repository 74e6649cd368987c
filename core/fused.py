"""The end of a chain and the draw as one call of compiled code, for the rows that ask for no more than that.

A processor says with `fused` that it is one of the four things the compiled draw does, and which of its parameters that
takes. Where the last processors of a chain say so, in the order temperature, top-k, top-p, min-p, and the sampler says
that it is `categorical`, their rows are drawn without calling them. What comes after them in a chain, and a stranger's
sampler, sends a row the long way; so does a processor that a row does not share with the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..hooks.params import GREEDY_BELOW
from .kernels.native.draw import NEUTRAL, Drawer, slots

if TYPE_CHECKING:
    from torch import Tensor

    from ..hooks.messages import Admit
    from .chain import DrawRows, Processor
    from .draw import Draw


class FusedTail:
    """What one chain and sampler leave to the compiled draw.

    Attributes:
        before: processors that run for all rows first.
        replaced: those whose work the call does.
    """

    def __init__(self, processors: Sequence[Processor], sampler: Draw, num_slots: int, drawer: Drawer) -> None:
        start, end = _run(processors) if sampler.fused == "categorical" else (len(processors), len(processors))
        self.before = list(processors[:start])
        self.replaced = list(processors[start:end])
        self._after = list(processors[end:])
        self._any_drawn = sampler.fused == "categorical"
        self._params = slots(num_slots)
        self._address: int = self._params.ctypes.data
        self._places = range(start, end)
        self._drawer = drawer

    def admit(self, op: Admit) -> None:
        """Take a slot's parameters."""
        row = self._params[op.slot]
        for name, value in NEUTRAL.items():
            row[name] = value
        row["seed"], row["choice"] = (op.params.seed or 0) % 2**64, op.choice
        for place, processor in zip(self._places, self.replaced, strict=True):
            params = op.chain[place]
            if params is not None:
                assert processor.fused is not None
                name, field = processor.fused
                row[name] = max(getattr(params, field), 0)
        if op.params.temperature < GREEDY_BELOW:
            row["temperature"], row["top_k"], row["top_p"], row["min_p"] = 0, 0, 1, 0

    def rows(self, drawing: DrawRows, own: set[int]) -> list[int]:
        """The rows of a draw that have no error and need nothing else.

        Args:
            own: slots whose chain and sampler these are.
        """
        busy = [processor.slots for processor in self._after if processor.slots]
        return [
            row
            for row, (slot, greedy) in enumerate(zip(drawing.slots, drawing.greedy, strict=True))
            if slot in own
            and row not in drawing.errors
            and (greedy or self._any_drawn)
            and not any(slot in slots for slots in busy)
        ]

    def does_all(self, slot: int, *, greedy: bool) -> bool:
        """Whether a slot's rows need nothing else, as long as they have no error."""
        others = (*self.before, *self._after)
        return (greedy or self._any_drawn) and not any(slot in processor.slots for processor in others)

    def draw_all(self, logits: Tensor, slots: array[int], positions: array[int]) -> list[int]:
        """A token for each row, of slots for which it `does_all`; -1 where the largest logit is not finite."""
        return self._drawer.draw_slots(logits, self._address, slots, positions).tolist()

    def draw(self, drawing: DrawRows, rows: list[int]) -> dict[int, tuple[int, float]]:
        """Row → (token, its largest logit); the token is -1 where that is not finite."""
        params = self._params[[drawing.slots[row] for row in rows]]
        params["position"] = [drawing.positions[row] for row in rows]
        ids, tops = self._drawer.draw(drawing.logits, params, rows)
        return dict(zip(rows, zip(ids, tops, strict=True), strict=True))


def _run(processors: Sequence[Processor]) -> tuple[int, int]:
    """The last processors that say `fused`, next to one another and in the order of the call."""
    order = list(NEUTRAL)
    ends = [i for i, processor in enumerate(processors) if processor.fused is not None]
    if not ends:
        return len(processors), len(processors)
    end = start = ends[-1] + 1
    limit = len(order)
    while start > 0 and (fused := processors[start - 1].fused) is not None and order.index(fused[0]) < limit:
        limit = order.index(fused[0])
        start -= 1
    return start, end
