"""A step being written: sequences are added one by one, and it becomes the flat arrays of `Step`."""

from __future__ import annotations

from array import array
from typing import Final

from ...hooks.messages import UNKNOWN_TOKEN, Admit, Fork, Release, Row, Step
from .live import Live

START_TOKENS: Final = 16
"""Tokens of an answer that are its start: who has read no more is used to no pace yet."""


class Draft:
    """Rows of the step *index*, in the order they were added; decode rows must come first."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_seqs = 0
        self.num_decodes = 0
        self.num_settled = 0
        """Decodes of streams that are past their start."""
        self.copies = array("i")
        self._tokens = array("i")
        self._positions = array("i")
        self._slots = array("i")
        self._seq_lens = array("i")
        self._cu_tokens = array("i", (0,))
        self._cu_blocks = array("i", (0,))
        self._block_tables = array("i")
        self._sample_rows = array("i")
        self._sample_slots = array("i")
        self._sample_positions = array("i")
        self._sample_drafts = array("i")
        self._score_rows = array("i")
        self._score_tokens = array("i")
        self._score_tops = array("i")
        self._rows: list[Row] = []

    @property
    def num_scores(self) -> int:
        return len(self._score_rows)

    def copy(self, source: int, target: int) -> None:
        """Copy a KV block before the step runs."""
        self.copies.append(source)
        self.copies.append(target)

    def decode(self, live: Live) -> None:
        """Compute the last token of *live*, whose id may still be on its way, and draw the next.

        Nearly all rows are such, so what `_add` and `_row` do is here in one.
        """
        position, tokens, sequence = live.num_computed, live.tokens, live.sequence
        num_known, slot = len(tokens), sequence.slot
        output_index = num_known + live.num_inflight - live.num_prompt
        self._rows.append(
            Row(
                sequence=sequence,
                epoch=sequence.epoch,
                num_tokens=1,
                num_computed=position + 1,
                samples=True,
                output_index=output_index,
                max_tokens=live.max_tokens,
                decode=output_index > 0,
            )
        )
        self._tokens.append(tokens[position] if position < num_known else UNKNOWN_TOKEN)
        self._positions.append(position)
        self._slots.append(slot)
        self._seq_lens.append(position + 1)
        self._block_tables.extend(live.blocks)
        self._cu_blocks.append(len(self._block_tables))
        self._sample_rows.append(self.num_tokens)
        self._sample_slots.append(slot)
        self._sample_positions.append(output_index)
        self._sample_drafts.append(-1)
        self.num_tokens += 1
        self._cu_tokens.append(self.num_tokens)
        if self.num_decodes == self.num_seqs:
            self.num_decodes += 1
        self.num_settled += output_index > START_TOKENS
        self.num_seqs += 1
        live.num_computed = position + 1
        live.num_inflight += 1
        live.last_step = self.index

    def speculate(self, live: Live, guesses: array[int]) -> None:
        """Compute the last token of *live* and *guesses* of those that follow, and draw after each of them."""
        self.num_settled += 1  # Guesses pay where much has been said already.
        start, num_tokens = live.num_computed, 1 + len(guesses)
        self._tokens.append(live.tokens[start])
        self._tokens.extend(guesses)
        self._positions.extend(range(start, start + num_tokens))
        self._add(live, num_tokens, samples=True, decode=True, num_drafts=len(guesses))
        for i, guess in enumerate(guesses):
            self._sample_rows.append(self.num_tokens - len(guesses) + i)
            self._sample_slots.append(live.sequence.slot)
            self._sample_positions.append(live.num_outputs + i)  # One of them is in flight: the row's own.
            self._sample_drafts.append(guess)

    def prefill(self, live: Live, num_tokens: int) -> None:
        """Compute the next *num_tokens* of *live*, and draw the one after if they are its last."""
        start, stop = live.num_computed, live.num_computed + num_tokens
        self._tokens.extend(live.tokens[start:stop])
        self._positions.extend(range(start, stop))
        num_scores = self._score(live, start, stop) if live.wants_scores else 0
        self._add(live, num_tokens, samples=stop == live.length, decode=False, num_scores=num_scores)

    def _score(self, live: Live, start: int, stop: int) -> int:
        """Have the tokens of the prompt scored that follow those at *start* … *stop* - 1; how many they are."""
        places = range(max(start + 1, live.num_scored), min(stop + 1, live.num_prompt))
        for place in places:
            self._score_rows.append(self.num_tokens + place - 1 - start)
            self._score_tokens.append(live.tokens[place])
            self._score_tops.append(live.request.params.prompt_logprobs or 0)
        live.num_scored += len(places)
        return len(places)

    def _add(
        self, live: Live, num_tokens: int, *, samples: bool, decode: bool, num_drafts: int = 0, num_scores: int = 0
    ) -> None:
        live.num_computed += num_tokens
        live.last_step = self.index
        self._slots.append(live.sequence.slot)
        self._seq_lens.append(live.num_computed)
        self._block_tables.extend(live.blocks)
        self.num_tokens += num_tokens
        self._cu_tokens.append(self.num_tokens)
        self._cu_blocks.append(len(self._block_tables))
        if num_tokens == 1 and self.num_decodes == self.num_seqs:
            self.num_decodes += 1
        self.num_seqs += 1
        self._row(live, num_tokens, samples=samples, decode=decode, num_drafts=num_drafts, num_scores=num_scores)

    def fork(self, live: Live) -> None:
        """Draw for *live* too from the row added last: a further choice of the same request."""
        live.last_step = self.index
        self._row(live, 0, samples=True, decode=False)

    def finish(self, slot_ops: tuple[Admit | Fork | Release, ...]) -> Step:
        return Step(
            index=self.index,
            slot_ops=slot_ops,
            block_copies=self.copies,
            tokens=self._tokens,
            positions=self._positions,
            slots=self._slots,
            seq_lens=self._seq_lens,
            cu_tokens=self._cu_tokens,
            cu_blocks=self._cu_blocks,
            block_tables=self._block_tables,
            sample_rows=self._sample_rows,
            sample_slots=self._sample_slots,
            sample_positions=self._sample_positions,
            sample_drafts=self._sample_drafts,
            num_decodes=self.num_decodes,
            rows=tuple(self._rows),
            score_rows=self._score_rows,
            score_tokens=self._score_tokens,
            score_tops=self._score_tops,
        )

    def _row(
        self, live: Live, num_tokens: int, *, samples: bool, decode: bool, num_drafts: int = 0, num_scores: int = 0
    ) -> None:
        sequence, output_index = live.sequence, live.num_outputs
        self._rows.append(
            Row(
                sequence=sequence,
                epoch=sequence.epoch,
                num_tokens=num_tokens,
                num_computed=live.num_computed,
                samples=samples,
                output_index=output_index,
                max_tokens=live.max_tokens,
                decode=decode,
                num_drafts=num_drafts,
                num_scores=num_scores,
            )
        )
        if samples:
            self._sample_rows.append(self.num_tokens - 1 - num_drafts)
            self._sample_drafts.append(-1)
            self._sample_slots.append(sequence.slot)
            self._sample_positions.append(output_index)
            live.num_inflight += 1
