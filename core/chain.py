"""Logits processors, each called with its own rows and no others.

What a processor cannot see it cannot harm. A built-in is given its rows as a view where they lie side by side; a
stranger is always given a copy, so that neither a reference it keeps nor a tensor it resizes leads to other rows. One
that raises, gives back the wrong thing or leaves a row without a largest logit fails those rows, by name, and the rest
of the batch goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor

from ..hooks.errors import BadRequest, RequestError
from ..hooks.messages import Admit, PluginTime
from ..hooks.protocols import History, Rows
from .containment import Account, Ledger, builtin
from .history import OwnHistory
from .uniform import uniforms

if TYPE_CHECKING:
    from ..hooks.components import Bound

OnCall = Callable[[str], None]

_NOT_WHEN_GREEDY = ("temperature", "truncate")


class DrawRows:
    """The rows of one draw. Those in *errors* take no further part.

    Attributes:
        logits: `[num_rows, vocab_size]` float32; changed from processor to processor.
        slots, positions, greedy: of each row.
        keys: (seed, choice) of each row, from which all its random numbers come.
        plugins: what each call of a plugin took.
        done: rows that have their token already.
        judged_later: the draw will find rows from which nothing can be drawn, so built-ins need not be looked after.

    Args:
        tops: the largest logit of each row, NaN where any is; for compiled code that is quicker than torch.
    """

    __slots__ = (
        "_all",
        "_any_greedy",
        "_owners",
        "_tops",
        "done",
        "errors",
        "greedy",
        "history",
        "judged_later",
        "keys",
        "logits",
        "plugins",
        "positions",
        "slots",
    )

    def __init__(
        self,
        logits: Tensor,
        slots: list[int],
        positions: list[int],
        greedy: list[bool],
        history: History,
        keys: list[tuple[int, int]],
        tops: Callable[[Tensor], list[float]] | None = None,
    ) -> None:
        self.logits = logits
        self.slots = slots
        self.positions = positions
        self.greedy = greedy
        self.history = history
        self.keys = keys
        self.errors: dict[int, RequestError] = {}
        self.plugins: list[PluginTime] = []
        self._all = list(range(len(slots)))
        self._owners = frozenset(slots)
        self._any_greedy = any(greedy)
        self._tops = tops
        self.done: frozenset[int] = frozenset()
        self.judged_later = False

    def of(self, slots: set[int], *, drawn_only: bool) -> list[int]:
        """The rows of *slots* that have no error.

        Args:
            drawn_only: leave the greedy ones out.
        """
        # Most steps are of one kind, and then nothing needs to be looked at row by row.
        if not self.errors and not self.done and self._owners <= slots and not (drawn_only and self._any_greedy):
            return self._all
        return [
            row
            for row, slot in enumerate(self.slots)
            if slot in slots
            and row not in self.errors
            and row not in self.done
            and not (drawn_only and self.greedy[row])
        ]

    def rows(self, rows: list[int], *, trusted: bool) -> Rows:
        """What a plugin is told of *rows*.

        Args:
            trusted: it may read the history where it lies.
        """
        whole = rows is self._all
        slots = list(self.slots) if whole else [self.slots[row] for row in rows]
        return Rows(
            slots,
            list(self.positions) if whole else [self.positions[row] for row in rows],
            self.history if trusted else OwnHistory(self.history, slots),
            lambda stream: self.uniforms(rows, crc32(stream.encode())),
        )

    def uniforms(self, rows: list[int], stream: int = 0) -> Tensor:
        """The random numbers of *rows*, `[len(rows)]` float64; see `core.uniform`."""
        seeds, choices = [self.keys[row][0] for row in rows], [self.keys[row][1] for row in rows]
        numbers = uniforms(seeds, choices, [self.positions[row] for row in rows], stream)
        return torch.from_numpy(numbers).to(self.logits.device)

    def unusable(self, logits: Tensor) -> list[tuple[int, float]]:
        """See the function; quicker where it can be."""
        if self._tops is None or logits.stride(-1) != 1:
            return unusable(logits)
        return [(row, value) for row, value in enumerate(self._tops(logits)) if not math.isfinite(value)]

    def fail(self, rows: list[int], error: RequestError) -> None:
        """None of *rows* gets a token."""
        self.errors.update(dict.fromkeys(rows, error))

    def spent(self, account: Account, rows: list[int], seconds: float) -> None:
        """Note what a call for *rows* took."""
        account.spent(seconds)
        slots = self._owners if len(rows) == len(self.slots) else frozenset([self.slots[row] for row in rows])
        self.plugins.append(PluginTime(who=account.key, seconds=seconds, slots=slots))


class Processor:
    """A logits processor and the slots whose rows it changes.

    Args:
        on_call: told whose code runs now, each time before it does.
    """

    __slots__ = ("_account", "_component", "_left", "_on_call", "_skips_greedy", "fused", "slots", "trusted")

    def __init__(self, bound: Bound, on_call: OnCall, ledger: Ledger) -> None:
        self._component = bound.component
        self._on_call = on_call
        self._account = ledger.account("logits_processor", bound)
        self.trusted = builtin(bound)
        self.fused: Mapping[str, str] | None = getattr(bound.component, "fused", None)
        self._skips_greedy = bound.component.phase in _NOT_WHEN_GREEDY
        self.slots: set[int] = set()
        self._left: set[int] = set()

    def admit(self, op: Admit, params: object) -> RequestError | None:
        """Take a slot's parameters; None: it does not use this processor. Gives back why that failed, if it did."""
        self.slots.discard(op.slot)
        self._left.discard(op.slot)
        account = self._account
        if params is None:
            return None
        if account.quarantined is not None:
            return account.refusal() if account.refuses(params) else None
        self._on_call(account.who)
        started = perf_counter()
        try:
            try:
                uses = self._component.admit(op.slot, params, op)
            finally:
                account.spent(perf_counter() - started, "admit")
            if uses:
                self.slots.add(op.slot)
            else:
                account.changes_nothing(params)
        except BaseException as error:  # Here no cancellation arrives; a plugin may raise anything.
            return failure(account, error, "admit")
        account.worked("admit")
        return None

    def release(self, slot: int, *, well: bool) -> None:
        """Nobody owns *slot* any more.

        Args:
            well: its sequence drew tokens and was never failed. Only that ends a row of failures, and no single call:
                who fails in the middle of every answer has many calls before that go well.
        """
        if slot in self.slots or slot in self._left:
            self.slots.discard(slot)
            self._left.discard(slot)
            if well:
                self._account.worked()

    def leave(self, slot: int) -> None:
        """The compiled draw does its work for *slot*, until that is admitted again."""
        self.slots.discard(slot)
        self._left.add(slot)

    def apply(self, drawing: DrawRows) -> None:
        """Change the rows of slots that use this processor."""
        rows = drawing.of(self.slots, drawn_only=self._skips_greedy)
        if not rows:
            return
        if self._account.quarantined is not None:
            drawing.fail(rows, self._account.refusal())
            return
        try:
            wrong = self._change(drawing, rows)
        except BaseException as error:  # As in `admit`.
            drawing.fail(rows, failure(self._account, error))
        else:
            self._judge(drawing, rows, wrong)

    def _change(self, drawing: DrawRows, rows: list[int]) -> list[tuple[int, float]]:
        """Let the plugin change *rows*; gives those from which nothing can be drawn now, as `unusable` does."""
        part, index = select(drawing.logits, rows)
        lent = part if self.trusted or index is not None else part.clone()
        shape, told = part.shape, drawing.rows(rows, trusted=self.trusted)
        self._on_call(self._account.who)
        started = perf_counter()
        try:
            result = self._component.apply(lent, told)
        finally:
            drawing.spent(self._account, rows, perf_counter() - started)
        result = checked(result, shape, torch.float32, drawing.logits.device)
        if index is not None:
            drawing.logits[index] = result
        elif result is not part:
            part.copy_(result)
        return [] if drawing.judged_later and self.trusted else drawing.unusable(result)

    def _judge(self, drawing: DrawRows, rows: list[int], wrong: list[tuple[int, float]]) -> None:
        """Fail the *wrong* among *rows*, and tell the account."""
        for row, largest in wrong:
            reason = ValueError(f"the largest logit must stay finite, found {largest}")
            drawing.errors[rows[row]] = self._account.failure(reason)
        # Who rules out all that others have left does what a request asked for; the request fails, it does not.
        broken = [largest for _, largest in wrong if largest != -math.inf]
        if len(broken) == len(rows):
            self._account.failed(f"the largest logit must stay finite, found {broken[0]}")
        elif wrong:
            self._account.served_some()


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


def checked(result: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a plugin gave back, as a plain tensor. Raises unless it is what its protocol promises."""
    if not isinstance(result, Tensor):
        raise TypeError(f"a tensor must come back, found {type(result).__name__}")
    if type(result) is not Tensor:
        result = result.as_subclass(Tensor)
    if result.shape != torch.Size(shape) or result.dtype != dtype:
        raise ValueError(f"{list(shape)} {dtype} must come back, found {list(result.shape)} {result.dtype}")
    if result.device != device or result.layout != torch.strided:
        raise ValueError(f"a dense tensor on {device} must come back, found {result.layout} on {result.device}")
    return result


def failure(account: Account, error: BaseException, method: str = "") -> RequestError:
    """What the client of a row is told when a plugin's call failed. Refusing on purpose stays a refusal."""
    if isinstance(error, BadRequest):
        return error
    account.failed(error, method)
    return account.failure(error)
