"""The sampling state of every slot, and the draw. Runs on the compute thread.

Receives a step's slot operations before the forward and its logits after it; gives back tokens. It knows nothing of
requests, text or endings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from ..hooks.errors import RequestError, RequestFailed
from ..hooks.messages import UNKNOWN_TOKEN, Admit, Fork, PluginTime, Release, TokenLogprobs
from ..hooks.params import GREEDY_BELOW
from .chain import DrawRows, OnCall, Processor, select
from .containment import Ledger
from .draw import Draw
from .fused import FusedTail
from .history import TokenHistory
from .kernels.native.draw import Drawer

if TYPE_CHECKING:
    from ..hooks.components import Bound

NO_DRAFT: Final = -1
MIN_LOGPROB: Final = -9999.0
"""Stands for the logarithm of 0, which JSON cannot say."""


class Draws(Struct, frozen=True, kw_only=True):
    """What one call of `draw` gave, by row. See `StepResult`, which has the same fields."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, RequestError]
    plugins: tuple[PluginTime, ...] = ()


class Owner(Struct, frozen=True, kw_only=True):
    """Whose a slot is, and why it cannot draw, if it cannot."""

    admitted: Admit
    greedy: bool
    refusal: RequestError | None


class SamplingState:
    """Sampling state by slot.

    Args:
        chain: logits processors in running order, a group a phase; `Admit.chain` has their parameters, flattened.
        sampler: draws for the slots that are not greedy.
        on_call: told whose code runs now, each time before it does; for a watchdog.
        ledger: where what they cost and their failures are noted.
        drawer: draws in compiled code what the built-in end of a chain would.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        chain: Sequence[Sequence[Bound]],
        sampler: Bound,
        on_call: OnCall = lambda who: None,
        ledger: Ledger | None = None,
        device: str = "cpu",
        drawer: Drawer | None = None,
    ) -> None:
        ledger = ledger or Ledger()
        self._processors = [Processor(bound, on_call, ledger) for group in chain for bound in group]
        self._sampler = Draw(sampler, on_call, ledger, vocab_size)
        self._drawer = drawer
        self._fused = FusedTail(self._processors, self._sampler, num_slots, drawer) if drawer is not None else None
        self._device = device
        self._history = TokenHistory(num_slots, device)
        self._owners: list[Owner | None] = [None] * num_slots
        self._last = [UNKNOWN_TOKEN] * num_slots

    def apply_ops(self, ops: tuple[Admit | Fork | Release, ...]) -> None:
        """Run a step's slot operations, in order. A processor that fails here fails its slot's rows in `draw`."""
        with torch.inference_mode():
            for op in ops:
                match op:
                    case Admit():
                        self._admit(op)
                    case Fork():
                        self._fork(op)
                    case Release():
                        self._release(op.slot)

    def last_token(self, slot: int) -> int:
        """The id drawn last for *slot*; `UNKNOWN_TOKEN` before its first."""
        return self._last[slot]

    def last_tokens(self, slots: list[int]) -> list[int]:
        """The ids drawn last for *slots*, `[len(slots)]` int64."""
        return [self._last[slot] for slot in slots]

    def draw(
        self, logits: Tensor, slots: list[int], positions: list[int], drafts: Sequence[int] | None = None
    ) -> Draws:
        """Draw one token for each row, and remember it as its slot's last.

        Args:
            logits: `[num_rows, vocab_size]` float32. Used up: processors write into it.
            slots: whose each row is. Where a slot has several rows, they see the same history.
            positions: tokens drawn for the slot before each row's.
            drafts: see `Step.sample_drafts`; None: nothing was guessed.
        """
        owners = [self._owner(slot) for slot in slots]
        if not owners:
            return Draws(token_ids=[], logprobs={}, errors={})
        with torch.inference_mode():
            keys = [(owner.admitted.params.seed or 0, owner.admitted.choice) for owner in owners]
            greedy = [owner.greedy for owner in owners]
            tops = None if self._drawer is None else self._drawer.tops
            rows = DrawRows(logits, slots, positions, greedy, self._history, keys, tops)
            return self._draw(rows, owners, drafts or [NO_DRAFT] * len(slots))

    def _admit(self, op: Admit) -> None:
        self._history.admit(op.slot, op.prompt_ids, op.output_ids)
        self._last[op.slot] = op.output_ids[-1] if op.output_ids else UNKNOWN_TOKEN
        greedy = op.params.temperature < GREEDY_BELOW
        if self._fused is not None:
            self._fused.admit(op)
        refusals = [processor.admit(op, params) for processor, params in zip(self._processors, op.chain, strict=True)]
        if not greedy:
            refusals.append(self._sampler.admit(op))
        if op.params.seed is None and not greedy:
            refusals.append(RequestFailed("a drawn request must have its seed settled before it starts, found none"))
        refusal = next((refusal for refusal in refusals if refusal is not None), None)
        self._owners[op.slot] = Owner(admitted=op, greedy=greedy, refusal=refusal)

    def _fork(self, op: Fork) -> None:
        # Processors know only how to admit, so a copy is admitted as a preempted sequence would be.
        source = self._owner(op.source).admitted
        output_ids = source.output_ids[:0]
        output_ids.extend(self._history.output(op.source).tolist())
        self._admit(msgspec.structs.replace(source, slot=op.slot, choice=op.choice, output_ids=output_ids))

    def _release(self, slot: int) -> None:
        owner = self._owners[slot]
        well = owner is not None and owner.refusal is None and self._last[slot] != UNKNOWN_TOKEN
        for processor in self._processors:
            processor.release(slot, well=well)
        if well and owner is not None and not owner.greedy:
            self._sampler.release()
        self._history.release(slot)
        self._owners[slot] = None
        self._last[slot] = UNKNOWN_TOKEN

    def _owner(self, slot: int) -> Owner:
        owner = self._owners[slot]
        assert owner is not None, f"slot {slot} is not owned"
        return owner

    def _draw(self, drawing: DrawRows, owners: list[Owner], drafts: Sequence[int]) -> Draws:
        drawing.errors.update({row: owner.refusal for row, owner in enumerate(owners) if owner.refusal is not None})
        before = self._processors if self._fused is None else self._fused.before
        fused = [] if self._fused is None else self._fused.rows(drawing)
        strangers = any(processor.slots and not processor.trusted for processor in before)
        # The compiled draw looks at what it is given. Else it is looked at here, before a processor is blamed for it.
        drawing.judged_later = len(fused) + len(drawing.errors) == len(owners) and not strangers
        if not drawing.judged_later:
            for row, largest in drawing.unusable(drawing.logits):
                drawing.errors.setdefault(row, _not_finite(largest))
        num_top = {row: n for row, owner in enumerate(owners) if (n := owner.admitted.params.logprobs) is not None}
        # Taken before any processor writes: clients are told the model's own distribution.
        scores = drawing.logits[list(num_top)].log_softmax(-1) if num_top else None
        for processor in before:
            if processor.slots:
                processor.apply(drawing)
        chosen = self._draw_fused(drawing, [row for row in fused if row not in drawing.errors])
        if len(chosen) < len(owners):
            for processor in self._processors[len(before) :]:
                if processor.slots:
                    processor.apply(drawing)
        token_ids = self._keep(drawing, self._choose(drawing, owners, chosen), drafts)
        for row, error in drawing.errors.items():
            # Its row in the step that is planned already asks no plugin again.
            self._owners[drawing.slots[row]] = msgspec.structs.replace(owners[row], refusal=error)
        logprobs = (
            {}
            if scores is None
            else {
                row: token_logprobs(row_scores, token_ids[row], num_top[row])
                for row, row_scores in zip(num_top, scores, strict=True)
                if token_ids[row] >= 0
            }
        )
        return Draws(token_ids=token_ids, logprobs=logprobs, errors=drawing.errors, plugins=tuple(drawing.plugins))

    def _keep(self, drawing: DrawRows, token_ids: list[int], drafts: Sequence[int]) -> list[int]:
        """Remember what was drawn. After a wrong guess nothing counts, neither a token nor an error."""
        previous = UNKNOWN_TOKEN
        for row, (slot, draft) in enumerate(zip(drawing.slots, drafts, strict=True)):
            if draft != NO_DRAFT and previous != draft:
                token_ids[row] = UNKNOWN_TOKEN
                drawing.errors.pop(row, None)
            elif row not in drawing.errors:
                self._history.append(slot, token_ids[row])
                self._last[slot] = token_ids[row]
            previous = token_ids[row]
        return token_ids

    def _draw_fused(self, drawing: DrawRows, rows: list[int]) -> dict[int, int]:
        """Row → token, for the *rows* that the compiled draw does."""
        if self._fused is None or not rows:
            return {}
        drawn = self._fused.draw(drawing, rows)
        drawing.done = frozenset(rows)
        for row, (token_id, largest) in drawn.items():
            if token_id < 0:
                drawing.errors[row] = _not_finite(largest)
        return {row: token_id for row, (token_id, _) in drawn.items()}

    def _choose(self, drawing: DrawRows, owners: list[Owner], chosen: dict[int, int]) -> list[int]:
        """The token of each row: the likeliest where greedy, else the sampler's; `UNKNOWN_TOKEN` with an error.

        Args:
            chosen: row → token, where that is known already.
        """
        live = [row for row in range(len(owners)) if row not in drawing.errors and row not in chosen]
        greedy = [row for row in live if drawing.greedy[row]]
        drawn = [row for row in live if not drawing.greedy[row]]
        if greedy:
            chosen.update(zip(greedy, argmax(select(drawing.logits, greedy)[0]), strict=True))
        if drawn:
            chosen.update(self._sampler.draw(drawing, drawn))
        return [chosen.get(row, UNKNOWN_TOKEN) for row in range(len(owners))]


def _not_finite(largest: float) -> RequestFailed:
    return RequestFailed(f"the model's largest logit must be finite for a token to be drawn, found {largest}")


def argmax(logits: Tensor) -> list[int]:
    """The likeliest id of each row, the smallest of equals."""
    # NumPy's is several times as fast on a CPU.
    ids: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return ids


def token_scores(logits: Tensor, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
    """How likely each of *token_ids* was, with its rank.

    Args:
        logits: `[len(token_ids), vocab_size]` float32, a row for each.
        num_tops: alternatives to report for each.
    """
    if not token_ids:
        return []
    scores = logits.log_softmax(-1)
    own = scores.gather(1, torch.tensor(token_ids, device=scores.device)[:, None])
    ranks = ((scores > own).sum(-1) + 1).tolist()
    return [
        msgspec.structs.replace(token_logprobs(row, token_id, num_top), rank=rank)
        for row, token_id, num_top, rank in zip(scores, token_ids, num_tops, ranks, strict=True)
    ]


def token_logprobs(scores: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """What a client is told of one token. *scores*: natural logarithms, `[vocab_size]`."""
    values, ids = scores.topk(min(num_top, len(scores)))
    return TokenLogprobs(
        logprob=max(scores[token_id].item(), MIN_LOGPROB),
        top_ids=tuple(ids.tolist()),
        top_logprobs=tuple(values.clamp(min=MIN_LOGPROB).tolist()),
    )
