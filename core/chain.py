"""Logits processors, each called with its own rows and no others.

What a processor cannot see it cannot harm: its rows are a view where they lie side by side, else a copy that is
written back. One that raises, gives back the wrong thing or leaves a row without a largest logit fails those rows,
by name, and the rest of the batch goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hooks.errors import BadRequest, RequestError, RequestFailed
from ..hooks.messages import Admit
from ..hooks.protocols import History, Rows

if TYPE_CHECKING:
    from ..hooks.components import Bound

OnCall = Callable[[str], None]

_NOT_WHEN_GREEDY = ("temperature", "truncate")


class DrawRows:
    """The rows of one draw. Those in *errors* take no further part.

    Attributes:
        logits: `[num_rows, vocab_size]` float32; changed from processor to processor.
        slots, positions, greedy: of each row.
    """

    __slots__ = ("errors", "greedy", "history", "logits", "positions", "slots")

    def __init__(
        self, logits: Tensor, slots: list[int], positions: list[int], greedy: list[bool], history: History
    ) -> None:
        self.logits = logits
        self.slots = slots
        self.positions = positions
        self.greedy = greedy
        self.history = history
        self.errors: dict[int, RequestError] = {}

    def rows(self, rows: list[int]) -> Rows:
        """What a plugin is told of *rows*."""
        return Rows([self.slots[row] for row in rows], [self.positions[row] for row in rows], self.history)


class Processor:
    """A logits processor and the slots whose rows it changes.

    Args:
        on_call: told whose code runs now, each time before it does.
    """

    __slots__ = ("_bound", "_on_call", "_skips_greedy", "_who", "slots")

    def __init__(self, bound: Bound, on_call: OnCall) -> None:
        self._bound = bound
        self._on_call = on_call
        self._who = who("logits processor", bound)
        self._skips_greedy = bound.component.phase in _NOT_WHEN_GREEDY
        self.slots: set[int] = set()

    def admit(self, op: Admit, params: object) -> RequestError | None:
        """Take a slot's parameters; None: it does not use this processor. Gives back why that failed, if it did."""
        self.slots.discard(op.slot)
        self._on_call(self._who)
        try:
            if params is not None and self._bound.component.admit(op.slot, params, op):
                self.slots.add(op.slot)
        except BaseException as error:  # Here no cancellation arrives; a plugin may raise anything.
            return failure("logits processor", self._bound, error)
        return None

    def apply(self, drawing: DrawRows) -> None:
        """Change the rows of slots that use this processor."""
        rows = [
            row
            for row, slot in enumerate(drawing.slots)
            if slot in self.slots and row not in drawing.errors and not (self._skips_greedy and drawing.greedy[row])
        ]
        if not rows:
            return
        part, index = select(drawing.logits, rows)
        shape = part.shape
        self._on_call(self._who)
        try:
            result = self._bound.component.apply(part, drawing.rows(rows))
            check(result, shape, torch.float32)
        except BaseException as error:  # Here no cancellation arrives; a plugin may raise anything.
            drawing.errors.update({row: failure("logits processor", self._bound, error) for row in rows})
            return
        if index is not None:
            drawing.logits[index] = result
        elif result is not part:
            part.copy_(result)
        for row, largest in unusable(result):
            reason = ValueError(f"the largest logit must stay finite, found {largest}")
            drawing.errors[rows[row]] = failure("logits processor", self._bound, reason)


def select(logits: Tensor, rows: list[int]) -> tuple[Tensor, Tensor | None]:
    """Ascending *rows*: a view where they lie side by side, else a copy, and the index that leads back."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1], None
    index = torch.tensor(rows, device=logits.device)
    return logits[index], index


def unusable(logits: Tensor) -> list[tuple[int, float]]:
    """(row, its largest logit) where nothing can be drawn: a NaN, +inf, or nothing above -inf."""
    largest = logits.amax(-1).tolist()
    return [(row, value) for row, value in enumerate(largest) if not math.isfinite(value)]


def check(result: object, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise unless a plugin gave back what its protocol promises."""
    if not isinstance(result, Tensor):
        raise TypeError(f"a tensor must come back, found {type(result).__name__}")
    if result.shape != torch.Size(shape) or result.dtype != dtype:
        raise ValueError(f"{list(shape)} {dtype} must come back, found {list(result.shape)} {result.dtype}")


def who(kind: str, bound: Bound) -> str:
    """Whose code it is, in messages."""
    return f"{kind} {bound.name} of plugin {bound.plugin}"


def failure(kind: str, bound: Bound, error: BaseException) -> RequestError:
    """What the client of one row is told when a plugin failed. Refusing on purpose stays a refusal."""
    if isinstance(error, BadRequest):
        return error
    message = f"{who(kind, bound)} failed: {type(error).__name__}: {error}"
    failed = RequestFailed(message, plugin=bound.plugin)
    failed.__cause__ = error
    return failed
