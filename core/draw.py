"""The sampler, called with the rows that are not greedy.

Like processors, a stranger is given copies. Whatever it does wrong fails the rows it was called for, by name.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ..hooks.errors import RequestError
from ..hooks.messages import Admit
from .chain import DrawRows, OnCall, checked, failure, select
from .containment import Ledger, builtin

if TYPE_CHECKING:
    from ..hooks.components import Bound


class Draw:
    """The chosen sampler. See `chain.Processor` for the arguments."""

    def __init__(self, bound: Bound, on_call: OnCall, ledger: Ledger, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._component = bound.component
        self._admit = getattr(bound.component, "admit", None)
        self._on_call = on_call
        self._account = ledger.account("sampler", bound)
        self._trusted = builtin(bound)
        self.fused: str | None = getattr(bound.component, "fused", None)

    def admit(self, op: Admit) -> RequestError | None:
        """Take a slot's parameters, where the sampler has any. Gives back why that failed, if it did."""
        account = self._account
        if account.quarantined is not None:
            return account.refusal()
        if self._admit is None or op.sampler is None:
            return None
        self._on_call(account.who)
        started = perf_counter()
        try:
            try:
                self._admit(op.slot, op.sampler, op)
            finally:
                account.spent(perf_counter() - started, "admit")
        except BaseException as error:  # Here no cancellation arrives; a plugin may raise anything.
            return failure(account, error, "admit")
        account.worked("admit")
        return None

    def release(self) -> None:
        """A sequence that it drew for is over, and went well. See `Processor.release`."""
        self._account.worked()

    def draw(self, drawing: DrawRows, rows: list[int]) -> dict[int, int]:
        """Row → the id the sampler drew for it. One that may not be drawn is an error of its row."""
        if self._account.quarantined is not None:
            drawing.fail(rows, self._account.refusal())
            return {}
        try:
            drawn, allowed = self._call(drawing, rows)
        except BaseException as error:  # As in `admit`.
            drawing.fail(rows, failure(self._account, error))
            return {}
        return self._judge(drawing, dict(zip(rows, drawn, strict=True)), allowed)

    def _call(self, drawing: DrawRows, rows: list[int]) -> tuple[list[int], list[bool]]:
        """The ids that the sampler gave for *rows*, and which of them may be drawn."""
        part, index = select(drawing.logits, rows)
        lent = part if self._trusted or index is not None else part.clone()
        numbers, told = drawing.uniforms(rows), drawing.rows(rows, trusted=self._trusted)
        self._on_call(self._account.who)
        started = perf_counter()
        try:
            result = self._component.sample(lent, numbers, told)
        finally:
            drawing.spent(self._account, rows, perf_counter() - started)
        ids = checked(result, [len(rows)], torch.int64, drawing.logits.device)
        drawn: list[int] = ids.tolist()
        inside = [0 <= token_id < self._vocab_size for token_id in drawn]
        if not all(inside):
            ids = ids.clamp(0, self._vocab_size - 1)
        # Looked up in our own logits: the sampler may have written into those it was lent.
        scores = part.gather(1, ids[:, None])[:, 0] if index is None else drawing.logits[index, ids]
        return drawn, [right and score > -math.inf for right, score in zip(inside, scores.tolist(), strict=True)]

    def _judge(self, drawing: DrawRows, drawn: dict[int, int], allowed: list[bool]) -> dict[int, int]:
        """Those of *drawn* that may be; the others are errors. Tells the account."""
        for (row, token_id), right in zip(list(drawn.items()), allowed, strict=True):
            if not right:
                reason = ValueError(f"a token that is not ruled out must be drawn, found {token_id}")
                drawing.errors[row] = self._account.failure(reason)
                del drawn[row]
        if not any(allowed):
            self._account.failed("a token that is not ruled out must be drawn")
        elif not all(allowed):
            self._account.served_some()
        return drawn
