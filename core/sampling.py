"""The sampling state of every slot, and the draw. Runs on the compute thread.

Receives a step's slot operations before the forward and its logits after it; gives back tokens. It knows nothing of
requests, text or endings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from ..hooks.errors import RequestError, RequestFailed
from ..hooks.messages import UNKNOWN_TOKEN, Admit, Fork, PluginTime, Release, TokenLogprobs
from ..hooks.params import GREEDY_BELOW
from .chain import DrawRows, OnCall
from .containment import Ledger
from .generation import Generation, not_finite
from .history import TokenHistory
from .kernels.native.draw import Drawer

if TYPE_CHECKING:
    from ..hooks.components import Bound
    from ..hooks.stack import Stack

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
    generation: Generation
    greedy: bool
    refusal: RequestError | None


class SamplingState:
    """Sampling state by slot.

    Args:
        chain: logits processors in running order, a group a phase; `Admit.chain` has their parameters, flattened.
        sampler: draws for the slots that are not greedy. Both are of the first Stack; others come with `Admit.stack`.
        on_call: told whose code runs now, each time before it does; for a watchdog.
        ledger: where what they cost and their failures are noted.
        drawer: draws in compiled code what the built-in end of a chain would.

    Attributes:
        history: the tokens of each slot.
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
        self._drawer = drawer
        self._open = partial(
            Generation,
            num_slots=num_slots,
            vocab_size=vocab_size,
            on_call=on_call,
            ledger=ledger or Ledger(),
            drawer=drawer,
        )
        self._generations = {0: self._open(chain, sampler)}
        """By revision of the Stack: the newest, and older ones while a slot is drawn by them."""
        self._device = device
        self.history = TokenHistory(num_slots, device)
        self._owners: list[Owner | None] = [None] * num_slots
        self._plain: set[int] = set()
        """Slots that are drawn by the compiled draw alone, and of which nobody wants to know more than the token."""
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
        """The id drawn last for each of *slots*."""
        return [self._last[slot] for slot in slots]

    def draw(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], drafts: Sequence[int] | None = None
    ) -> Draws:
        """Draw one token for each row, and remember it as its slot's last.

        Args:
            logits: `[num_rows, vocab_size]` float32. Used up: processors write into it.
            slots: whose each row is. Where a slot has several rows, they see the same history.
            positions: tokens drawn for the slot before each row's.
            drafts: see `Step.sample_drafts`; None: nothing was guessed.
        """
        guessed = drafts is not None and drafts.count(NO_DRAFT) < len(drafts)
        if slots and not guessed and self._plain.issuperset(slots):
            token_ids = self._draw_plain(logits, slots, positions)
            if token_ids is not None:
                return Draws(token_ids=token_ids, logprobs={}, errors={})
        owners = [self._owner(slot) for slot in slots]
        if not owners:
            return Draws(token_ids=[], logprobs={}, errors={})
        with torch.inference_mode():
            keys = [(owner.admitted.params.seed or 0, owner.admitted.choice) for owner in owners]
            greedy = [owner.greedy for owner in owners]
            tops = None if self._drawer is None else self._drawer.tops
            rows = DrawRows(logits, list(slots), list(positions), greedy, self.history, keys, tops)
            return self._draw(rows, owners, drafts or [NO_DRAFT] * len(slots))

    def _admit(self, op: Admit) -> None:
        self.history.admit(op.slot, op.prompt_ids, op.output_ids)
        self._last[op.slot] = op.output_ids[-1] if op.output_ids else UNKNOWN_TOKEN
        greedy = op.params.temperature < GREEDY_BELOW
        generation = self._generation(op.stack)
        refusal = generation.admit(op, greedy=greedy)
        if refusal is None and op.params.seed is None and not greedy:
            refusal = RequestFailed("a drawn request must have its seed settled before it starts, found none")
        self._owners[op.slot] = Owner(admitted=op, generation=generation, greedy=greedy, refusal=refusal)
        self._plain.discard(op.slot)
        if refusal is None and op.params.logprobs is None and generation.is_plain(op.slot, greedy=greedy):
            self._plain.add(op.slot)

    def _generation(self, stack: Stack | None) -> Generation:
        revision = 0 if stack is None else stack.revision
        if revision not in self._generations:
            assert stack is not None, "the first stack has gone, and so have all that know of no other"
            self._generations = {each: found for each, found in self._generations.items() if found.slots}
            self._generations[revision] = self._open([group for _, group in stack.chain], stack.sampler)
        return self._generations[revision]

    def _fork(self, op: Fork) -> None:
        # Processors know only how to admit, so a copy is admitted as a preempted sequence would be.
        source = self._owner(op.source).admitted
        output_ids = source.output_ids[:0]
        output_ids.extend(self.history.output(op.source).tolist())
        self._admit(msgspec.structs.replace(source, slot=op.slot, choice=op.choice, output_ids=output_ids))

    def _release(self, slot: int) -> None:
        owner = self._owners[slot]
        well = owner is not None and owner.refusal is None and self._last[slot] != UNKNOWN_TOKEN
        if owner is not None:
            owner.generation.release(slot, well=well, greedy=owner.greedy)
            if not owner.generation.slots:
                newest = max(self._generations)
                self._generations = {
                    each: found for each, found in self._generations.items() if found.slots or each == newest
                }
        self.history.release(slot)
        self._owners[slot] = None
        self._plain.discard(slot)
        self._last[slot] = UNKNOWN_TOKEN

    def _owner(self, slot: int) -> Owner:
        owner = self._owners[slot]
        assert owner is not None, f"slot {slot} is not owned"
        return owner

    def _draw_plain(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> list[int] | None:
        """What nearly every step is: one call, and a note of what it gave; each look at a row would count.

        None where it cannot be, before anything is remembered.
        """
        if len(self._generations) != 1:
            return None
        (generation,) = self._generations.values()
        rows = [each if isinstance(each, array) else array("i", each) for each in (slots, positions)]
        token_ids = generation.draw_plain(logits, *rows)
        if min(token_ids) < 0:
            return None  # The long way says of which row, and why.
        history, last, note = self.history, self._last, generation.note
        for slot, token_id in zip(slots, token_ids, strict=True):
            history.append(slot, token_id)
            note(slot, token_id)
            last[slot] = token_id
        return token_ids

    def _draw(self, drawing: DrawRows, owners: list[Owner], drafts: Sequence[int]) -> Draws:
        drawing.errors.update({row: owner.refusal for row, owner in enumerate(owners) if owner.refusal is not None})
        generations = self._present(owners)
        quick = [generation.quick(drawing) for generation in generations]
        # The compiled draw looks at what it is given. Else it is looked at here, before a processor is blamed for it.
        drawing.judged_later = sum(map(len, quick)) + len(drawing.errors) == len(owners) and not any(
            generation.wary for generation in generations
        )
        if not drawing.judged_later:
            for row, largest in drawing.unusable(drawing.logits):
                drawing.errors.setdefault(row, not_finite(largest))
        num_top = {row: n for row, owner in enumerate(owners) if (n := owner.admitted.params.logprobs) is not None}
        # Taken before any processor writes: clients are told the model's own distribution.
        scores = drawing.logits[list(num_top)].log_softmax(-1) if num_top else None
        chosen: dict[int, int] = {}
        for generation, rows in zip(generations, quick, strict=True):
            chosen |= generation.draw(drawing, rows)
        token_ids = self._keep(drawing, [chosen.get(row, UNKNOWN_TOKEN) for row in range(len(owners))], drafts)
        for row, error in drawing.errors.items():
            # Its row in the step that is planned already asks no plugin again.
            self._owners[drawing.slots[row]] = msgspec.structs.replace(owners[row], refusal=error)
            self._plain.discard(drawing.slots[row])
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
                self.history.append(slot, token_ids[row])
                self._owner(slot).generation.note(slot, token_ids[row])
                self._last[slot] = token_ids[row]
            previous = token_ids[row]
        return token_ids

    def _present(self, owners: list[Owner]) -> list[Generation]:
        """Whose rows there are."""
        if len(self._generations) == 1:
            return list(self._generations.values())
        return list(dict.fromkeys(owner.generation for owner in owners))


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
