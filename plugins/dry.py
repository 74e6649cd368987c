"""Logits processor `dry`: makes tokens less likely that would prolong a repetition of prompt or answer.

Where the last n tokens have stood before, n at least *allowed_length*, what followed them there loses *multiplier* ·
*base* ** (n - *allowed_length*); of several such places the longest counts. A repetition does not reach across a
sequence breaker: a token whose text holds one of them.

Source: its author's proposal and code, "DRY: A modern repetition penalty", text-generation-webui pull request 5677,
2024; breakers by text, as llama.cpp reads them. A match that is more than `MAX_EXTRA` tokens longer than allowed counts
as that long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, Phase, Register, Rows, Tokenizer
from ..hooks.registry import plugin
from .no_repeat_ngram import last_tokens

headrace_api = 1

MAX_EXTRA = 100
LARGEST = 1e30
"""Of a penalty: beyond it, sums with float32 logits overflow."""

Breaker = Annotated[str, Meta(min_length=1, max_length=64)]


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names as in llama.cpp, without `dry_`."""

    multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Subtracted from the logit that would make a repetition just too long. 0: off."""
    base: Annotated[float, Meta(ge=1, le=8)] = 1.75
    """How much more each further token costs."""
    allowed_length: Annotated[int, Meta(ge=1, le=2**20)] = 2
    """Repeated tokens after which the next one is penalized."""
    penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """How many of the last tokens are looked at. -1: all; 0: off."""
    sequence_breakers: Annotated[tuple[Breaker, ...], Meta(max_length=64)] = ("\n", ":", '"', "*")
    """Texts across which nothing repeats."""


class Dry:
    phase: ClassVar[Phase] = "penalty"

    def __init__(self, context: Context, options: Params) -> None:
        assert context.sampling is not None
        self._vocab_size = context.sampling.vocab_size
        self._device = context.sampling.device
        self._texts = TokenTexts(context.tokenizer, self._vocab_size)
        self._params = [Params()] * context.sampling.num_slots
        self._breakers = [self._breaker_mask(options.sequence_breakers)] * context.sampling.num_slots

    @lru_cache(maxsize=32)  # noqa: B019, for a processor lives as long as the process.
    def _breaker_mask(self, texts: tuple[str, ...]) -> Tensor:
        """`[vocab_size]` bool: the tokens across which nothing repeats."""
        mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        mask[torch.tensor(sorted(self._texts.holding(texts)), dtype=torch.int64)] = True
        return mask

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._params[slot] = params
        if params.multiplier == 0 or params.penalty_last_n == 0:
            return False
        self._breakers[slot] = self._breaker_mask(params.sequence_breakers)
        return True

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        for row, slot in enumerate(rows.slots):
            params = self._params[slot]
            tokens = last_tokens(rows, slot, max(params.penalty_last_n, 0))
            ids, lengths = repetitions(tokens, self._breakers[slot], params.allowed_length + MAX_EXTRA)
            far = lengths >= params.allowed_length
            if not far.any():
                continue
            penalties = params.multiplier * params.base ** (lengths[far] - params.allowed_length).double()
            followers, places = torch.unique(ids[far], return_inverse=True)
            largest = torch.zeros(len(followers), dtype=torch.float64, device=logits.device)
            largest.scatter_reduce_(0, places, penalties.clamp_(max=LARGEST), "amax")
            logits[row, followers] -= largest.float()
        return logits


def repetitions(tokens: Tensor, breakers: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Where the end of *tokens* has stood before.

    Args:
        tokens: `[num_tokens]` int64.
        breakers: `[vocab_size]` bool.

    Returns:
        What followed each place, and how many tokens before it equal those at the end; both int64.
    """
    if len(tokens) < 2 or breakers[tokens[-1]]:
        return tokens[:0], tokens[:0]
    ends = (tokens[:-1] == tokens[-1]).nonzero()[:, 0]
    ends = ends[~breakers[tokens[ends + 1]]]
    lengths = torch.ones_like(ends)
    growing = torch.arange(len(ends), device=tokens.device)
    for length in range(1, min(max_length, len(tokens) - 1)):
        before = tokens[-1 - length]
        if not len(growing) or breakers[before]:
            break
        growing = growing[ends[growing] >= length]
        growing = growing[tokens[ends[growing] - length] == before]
        lengths[growing] += 1
    return tokens[ends + 1], lengths


class TokenTexts:
    """What every token stands for, in one string of bytes that can be searched.

    Args:
        tokenizer: None: no token has a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        num_tokens = 0 if tokenizer is None else min(vocab_size, tokenizer.num_tokens)
        texts = [] if tokenizer is None else [tokenizer.token_bytes(id) for id in range(num_tokens)]
        self._text = b"".join(texts)
        self._starts = [0]
        for text in texts:
            self._starts.append(self._starts[-1] + len(text))

    def holding(self, parts: Iterable[str]) -> set[int]:
        """The tokens whose text has one of *parts* in it."""
        found: set[int] = set()
        for part in map(str.encode, parts):
            place = self._text.find(part)
            while place >= 0:
                token = bisect_right(self._starts, place) - 1
                if place + len(part) <= self._starts[token + 1]:
                    found.add(token)
                place = self._text.find(part, place + 1)
        return found


@plugin
def register_logits_processor(register: Register) -> None:
    register("dry", Dry, config=Params, params=Params, doc="Make what prolongs a repetition less likely.")
