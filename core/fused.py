"""The end of a chain and the draw as one call of compiled code, for the rows that ask for no more than that.

A processor says with `fused` that it is one of the things the compiled draw does, and which of its parameters that
takes. Where the last processors of a chain say so, in the order temperature, top-k, top-p, min-p, and the sampler says
that it is `categorical`, their rows are drawn without calling them. What comes after them in a chain, and a stranger's
sampler, sends a row the long way; so does a processor that a row does not share with the others. Penalties before them
go into the call too, of each slot by itself: where nothing that the slot uses comes between.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..hooks.params import GREEDY_BELOW
from .kernels.native.draw import NEUTRAL, NO_PENALTY, Drawer, slots

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
        self._tokens: dict[int, array[int]] = {}
        """Of slots with penalties: prompt and output, for the call."""
        self._addresses, self._lengths = self._params["tokens"], self._params["num_tokens"]

    def admit(self, op: Admit) -> None:
        """Take a slot's parameters, when its processors have."""
        row = self._params[op.slot]
        for name, value in NEUTRAL.items():
            row[name] = value
        row["num_tokens"] = 0
        row["seed"], row["choice"] = (op.params.seed or 0) % 2**64, op.choice
        for place, processor in zip(self._places, self.replaced, strict=True):
            params = op.chain[place]
            if params is not None:
                for name, field in (processor.fused or {}).items():
                    row[name] = max(getattr(params, field), 0)
        greedy = op.params.temperature < GREEDY_BELOW
        if greedy:
            row["temperature"], row["top_k"], row["top_p"], row["min_p"] = 0, 0, 1, 0
        self._tokens.pop(op.slot, None)
        if self._ends(op.slot, greedy=greedy) and self._take_penalties(op):
            self._tokens[op.slot] = op.prompt_ids + op.output_ids
            row["num_prompt"] = len(op.prompt_ids)
            self._point(op.slot)

    def release(self, slot: int) -> None:
        """Nobody owns *slot* any more."""
        if self._tokens.pop(slot, None) is not None:
            self._lengths[slot] = 0

    def note(self, slot: int, token_id: int) -> None:
        """Remember what was drawn for *slot*."""
        if (tokens := self._tokens.get(slot)) is not None:
            tokens.append(token_id)
            self._point(slot)

    def rows(self, drawing: DrawRows, own: set[int]) -> list[int]:
        """The rows of a draw that have no error and need nothing else.

        Args:
            own: slots whose chain and sampler these are.
        """
        return [
            row
            for row, (slot, greedy) in enumerate(zip(drawing.slots, drawing.greedy, strict=True))
            if slot in own and row not in drawing.errors and self._ends(slot, greedy=greedy)
        ]

    def does_all(self, slot: int, *, greedy: bool) -> bool:
        """Whether a slot's rows need nothing else, as long as they have no error."""
        return self._ends(slot, greedy=greedy) and not any(slot in processor.slots for processor in self.before)

    def draw_all(self, logits: Tensor, slots: array[int], positions: array[int]) -> list[int]:
        """A token for each row, of slots for which it `does_all`; -1 where the largest logit is not finite."""
        return self._drawer.draw_slots(logits, self._address, slots, positions).tolist()

    def draw(self, drawing: DrawRows, rows: list[int]) -> dict[int, tuple[int, float]]:
        """Row → (token, its largest logit); the token is -1 where that is not finite."""
        params = self._params[[drawing.slots[row] for row in rows]]
        params["position"] = [drawing.positions[row] for row in rows]
        ids, tops = self._drawer.draw(drawing.logits, params, rows)
        return dict(zip(rows, zip(ids, tops, strict=True), strict=True))

    def _ends(self, slot: int, *, greedy: bool) -> bool:
        """Whether the call is the end of what a slot's rows need."""
        return (greedy or self._any_drawn) and not any(slot in processor.slots for processor in self._after)

    def _take_penalties(self, op: Admit) -> bool:
        """Have the call do the work of a slot's last processors before it that are penalties; False: there are none."""
        row, order, taken = self._params[op.slot], list(NO_PENALTY), False
        limit = len(order)
        for processor, params in zip(reversed(self.before), reversed(op.chain[: len(self.before)]), strict=True):
            if op.slot not in processor.slots:
                continue
            place = _place(processor, order[:limit])
            if place is None:
                break
            for name, field in (processor.fused or {}).items():
                row[name] = getattr(params, field)
            processor.leave(op.slot)
            limit, taken = place, True
        return taken

    def _point(self, slot: int) -> None:
        self._addresses[slot], self._lengths[slot] = self._tokens[slot].buffer_info()


def _run(processors: Sequence[Processor]) -> tuple[int, int]:
    """The last processors that say `fused` and are no penalties, side by side and in the order of the call."""
    order = [name for name in NEUTRAL if name not in NO_PENALTY]
    places = [_place(processor, order) for processor in processors]
    end = max((i + 1 for i, place in enumerate(places) if place is not None), default=len(places))
    start, limit = end, len(order)
    while start > 0 and (place := places[start - 1]) is not None and place < limit:
        start, limit = start - 1, place
    return start, end


def _place(processor: Processor, order: list[str]) -> int | None:
    """Where in *order* a processor's work begins, if all of it is there."""
    if not processor.fused or not set(processor.fused) <= set(order):
        return None
    return min(order.index(name) for name in processor.fused)
