"""Logits processor `bad-words`: words and rows of tokens that may not be written.

The last token of each is ruled out wherever the others stand before it, in prompt and answer together. A word is
ruled out as its tokens are, at the start of a text and after a space; other ways to spell it are not found.

Source for behaviour: transformers, `NoBadWordsLogitsProcessor`; the two spellings: vLLM, `SamplingParams.bad_words`.
"""

from __future__ import annotations

import math
from array import array
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.errors import BadRequest
from ..hooks.messages import Admit
from ..hooks.params import TokenId
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1

Word = Annotated[str, Meta(min_length=1, max_length=64)]
Ids = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bad_words: Annotated[tuple[Word, ...], Meta(max_length=128)] = ()
    """Words that may not be written."""
    bad_words_ids: Annotated[tuple[Ids, ...], Meta(max_length=1024)] = ()
    """Rows of token ids that may not be written."""


class BadWords:
    phase: ClassVar[Phase] = "mask"

    def __init__(self, context: Context, options: Params) -> None:
        assert context.sampling is not None
        self._vocab_size = context.sampling.vocab_size
        self._device = context.sampling.device
        self._tokenizer = context.tokenizer
        self._singles = [torch.empty(0, dtype=torch.int64)] * context.sampling.num_slots
        self._longer: list[list[tuple[Tensor, int]]] = [[]] * context.sampling.num_slots
        self._spellings = lru_cache(maxsize=1024)(self._encode)

    def check(self, params: Params) -> None:
        """Raises:
        BadRequest: an id the model does not have, or a word that has no tokens.
        """
        for ids in params.bad_words_ids:
            if max(ids) >= self._vocab_size:
                raise BadRequest(f"bad_words_ids: token ids must be < {self._vocab_size}, got {max(ids)}")
        for word in params.bad_words:
            if not self._spellings(word):
                raise BadRequest(f"bad_words: a word must have tokens, got {word!r}")

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        spellings = {ids for word in params.bad_words for ids in self._spellings(word)}
        spellings.update(params.bad_words_ids)
        self._singles[slot] = torch.tensor(
            sorted(ids[0] for ids in spellings if len(ids) == 1), dtype=torch.int64, device=self._device
        )
        self._longer[slot] = [
            (torch.tensor(ids[:-1], device=self._device), ids[-1]) for ids in sorted(spellings) if len(ids) > 1
        ]
        return bool(spellings)

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        for row, slot in enumerate(rows.slots):
            logits[row].index_fill_(0, self._singles[slot], -math.inf)
            if not self._longer[slot]:
                continue
            longest = max(len(before) for before, _ in self._longer[slot])
            tail = torch.cat([rows.history.prompt(slot)[-longest:], rows.history.output(slot)[-longest:]])
            for before, last in self._longer[slot]:
                if len(before) <= len(tail) and torch.equal(tail[-len(before) :], before):
                    logits[row, last] = -math.inf
        return logits

    def _encode(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The token ids of *word*, at the start of a text and after a space."""
        if self._tokenizer is None:
            raise BadRequest("bad_words: there is no tokenizer here; give bad_words_ids")
        bare = self._tokenizer.encode(word, parse_special=False, add_special=False)
        spaced = self._tokenizer.encode(" " + word.lstrip(), parse_special=False, add_special=False)
        found: list[array[int]] = [bare]
        # Of the second spelling's tokens only those that hold the word: not a space by itself.
        if bare and len(spaced) == len(bare) and spaced != bare:
            found.append(spaced)
        return tuple(tuple(ids) for ids in found if ids)


@plugin
def register_logits_processor(register: Register) -> None:
    register("bad-words", BadWords, config=Params, params=Params, doc="Words that may not be written.")
