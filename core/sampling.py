"""The sampling state of every slot, and the draw. Runs on the compute thread.

Receives a step's slot operations before the forward and its logits after it; gives back tokens. It knows nothing of
requests, text or endings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from ..hooks.errors import RequestError, RequestFailed
from ..hooks.messages import UNKNOWN_TOKEN, Admit, Fork, Release, TokenLogprobs
from ..hooks.params import GREEDY_BELOW
from .chain import DrawRows, OnCall, Processor, check, failure, select, unusable, who
from .history import TokenHistory
from .uniform import uniforms

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
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        chain: Sequence[Sequence[Bound]],
        sampler: Bound,
        on_call: OnCall = lambda who: None,
        device: str = "cpu",
    ) -> None:
        self._vocab_size = vocab_size
        self._processors = [Processor(bound, on_call) for group in chain for bound in group]
        self._sampler = sampler
        self._on_call = on_call
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

    def last_tokens(self, slots: list[int]) -> Tensor:
        """The ids drawn last for *slots*, `[len(slots)]` int64."""
        return torch.tensor([self._last[slot] for slot in slots], dtype=torch.int64, device=self._device)

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
            rows = DrawRows(logits, slots, positions, [owner.greedy for owner in owners], self._history)
            return self._draw(rows, owners, drafts or [NO_DRAFT] * len(slots))

    def _admit(self, op: Admit) -> None:
        self._history.admit(op.slot, op.prompt_ids, op.output_ids)
        self._last[op.slot] = op.output_ids[-1] if op.output_ids else UNKNOWN_TOKEN
        greedy = op.params.temperature < GREEDY_BELOW
        refusals = [processor.admit(op, params) for processor, params in zip(self._processors, op.chain, strict=True)]
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
        self._history.release(slot)
        self._owners[slot] = None
        self._last[slot] = UNKNOWN_TOKEN
        for processor in self._processors:
            processor.slots.discard(slot)

    def _owner(self, slot: int) -> Owner:
        owner = self._owners[slot]
        assert owner is not None, f"slot {slot} is not owned"
        return owner

    def _draw(self, drawing: DrawRows, owners: list[Owner], drafts: Sequence[int]) -> Draws:
        drawing.errors.update({row: owner.refusal for row, owner in enumerate(owners) if owner.refusal is not None})
        for row, largest in unusable(drawing.logits):
            reason = f"the model's largest logit must be finite for a token to be drawn, found {largest}"
            drawing.errors.setdefault(row, RequestFailed(reason))
        num_top = {row: n for row, owner in enumerate(owners) if (n := owner.admitted.params.logprobs) is not None}
        # Taken before any processor writes: clients are told the model's own distribution.
        scores = drawing.logits[list(num_top)].log_softmax(-1) if num_top else None
        for processor in self._processors:
            if processor.slots:
                processor.apply(drawing)
        token_ids = self._keep(drawing, self._choose(drawing, owners), drafts)
        logprobs = (
            {}
            if scores is None
            else {
                row: token_logprobs(row_scores, token_ids[row], num_top[row])
                for row, row_scores in zip(num_top, scores, strict=True)
                if token_ids[row] >= 0
            }
        )
        return Draws(token_ids=token_ids, logprobs=logprobs, errors=drawing.errors)

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

    def _choose(self, drawing: DrawRows, owners: list[Owner]) -> list[int]:
        """The token of each row: the likeliest where greedy, else the sampler's; `UNKNOWN_TOKEN` with an error."""
        live = [row for row in range(len(owners)) if row not in drawing.errors]
        greedy = [row for row in live if drawing.greedy[row]]
        drawn = [row for row in live if not drawing.greedy[row]]
        chosen: dict[int, int] = {}
        if greedy:
            chosen.update(zip(greedy, argmax(select(drawing.logits, greedy)[0]), strict=True))
        if drawn:
            chosen.update(self._sample(drawing, drawn, [owners[row].admitted for row in drawn]))
        return [chosen.get(row, UNKNOWN_TOKEN) for row in range(len(owners))]

    def _sample(self, drawing: DrawRows, rows: list[int], admitted: list[Admit]) -> dict[int, int]:
        """Row → the id the sampler drew for it. One that may not be drawn is an error of its row."""
        logits, _ = select(drawing.logits, rows)
        seeds = [owner.params.seed or 0 for owner in admitted]
        numbers = uniforms(seeds, [owner.choice for owner in admitted], [drawing.positions[row] for row in rows])
        self._on_call(who("sampler", self._sampler))
        try:
            ids = self._sampler.component.sample(
                logits, torch.from_numpy(numbers).to(logits.device), drawing.rows(rows)
            )
            check(ids, [len(rows)], torch.int64)
        except BaseException as error:  # As in `Processor.apply`.
            drawing.errors.update({row: failure("sampler", self._sampler, error) for row in rows})
            return {}
        inside = ids.clamp(0, self._vocab_size - 1)
        allowed = (inside == ids) & (logits.gather(1, inside[:, None])[:, 0] > -math.inf)
        drawn = dict(zip(rows, ids.tolist(), strict=True))
        for row, right in zip(rows, allowed.tolist(), strict=True):
            if not right:
                reason = ValueError(f"a token that is not ruled out must be drawn, found {drawn.pop(row)}")
                drawing.errors[row] = failure("sampler", self._sampler, reason)
        return drawn


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
