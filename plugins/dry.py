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

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, History, Phase, Register, Rows, Tokenizer
from ..hooks.registry import plugin

headrace_api = 1

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

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
        self._texts = TokenTexts(context.tokenizer, self._vocab_size)
        self._params = [Params()] * context.sampling.num_slots
        self._pasts: dict[int, Past] = {}
        self._longest = np.zeros(self._vocab_size, dtype=np.int64)
        """Room to work in: all 0 between rows."""

    @lru_cache(maxsize=32)  # noqa: B019, for a processor lives as long as the process.
    def _breaker_mask(self, texts: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """`[vocab_size]`: the tokens across which nothing repeats."""
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[sorted(self._texts.holding(texts))] = True
        return mask

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._params[slot] = params
        self._pasts.pop(slot, None)
        if params.multiplier == 0 or params.penalty_last_n == 0:
            return False
        breakers, max_length = self._breaker_mask(params.sequence_breakers), params.allowed_length + MAX_EXTRA
        self._pasts[slot] = Past(breakers, window=max(params.penalty_last_n, 0), max_length=max_length)
        return True

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        where: list[tuple[IntArray, IntArray]] = []
        penalties: list[FloatArray] = []
        for row, slot in enumerate(rows.slots):
            params, past = self._params[slot], self._pasts[slot]
            past.follow(rows.history, slot)
            ids, lengths = past.repetitions(params.allowed_length)
            if len(ids):
                extra = self._longest_of(ids, lengths - params.allowed_length)
                where.append((np.full_like(ids, row), ids))
                penalties.append(np.minimum(params.multiplier * params.base ** extra.astype(np.float64), LARGEST))
        if where:
            index = tuple(torch.from_numpy(np.concatenate(part)).to(logits.device) for part in zip(*where, strict=True))
            lost = torch.from_numpy(np.concatenate(penalties)).float().to(logits.device)
            # A token that has followed several times has the same penalty each time, and loses it once.
            logits[index] = logits[index] - lost
        return logits

    def _longest_of(self, ids: IntArray, lengths: IntArray) -> IntArray:
        """The largest of the *lengths*, not negative, that belong to the same id, for each."""
        np.maximum.at(self._longest, ids, lengths)
        longest: IntArray = self._longest[ids]
        self._longest[ids] = 0
        return longest


class Past:
    """The tokens of a slot, and where its last ones have stood before. Goes on token by token.

    Where the new token has stood, the repetition that ended just before it is one longer, and all others are over.

    Args:
        breakers: `[vocab_size]`: the tokens across which nothing repeats.
        window: how many of the last tokens are looked at. 0: all.
        max_length: from where on it does not matter how long a repetition is.
    """

    def __init__(self, breakers: npt.NDArray[np.bool_], *, window: int, max_length: int) -> None:
        self.breakers = breakers
        self._window = window
        self._max_length = max_length
        self._num_prompt = 0
        self._num_tokens = 0
        self._tokens = np.zeros(0, dtype=np.int64)
        """Prompt and answer; behind them, room to grow."""
        self._ends = self._lengths = self._tokens
        """Ascending places where the last token has stood before, and how many tokens up to there equal the last."""
        self._grown = self._tokens
        """Room to work in, by place: all 0 between tokens."""

    def follow(self, history: History, slot: int) -> None:
        """Take in what has been drawn since the last call."""
        output = history.output(slot)
        num_new = self._num_prompt + len(output) - self._num_tokens
        if num_new == 1 and self._num_tokens:
            self._append(int(output[-1]))
        elif num_new or not self._num_tokens:
            prompt = history.prompt(slot)
            self._num_prompt = len(prompt)
            self._read(np.concatenate([prompt.cpu().numpy(), output.cpu().numpy()]))

    def repetitions(self, least: int) -> tuple[IntArray, IntArray]:
        """What followed where the last *least* tokens or more have stood, and how many did.

        An id may come several times. A breaker does not come: it prolongs nothing.
        """
        ends, lengths = self._ends, self._lengths
        if self._window:
            lengths = np.minimum(lengths, ends - self._first() + 1)
        far = np.flatnonzero(lengths >= least)
        ids = self._tokens[ends[far] + 1]
        kept = ~self.breakers[ids]
        return ids[kept], np.minimum(lengths[far][kept], self._max_length)

    def _first(self) -> int:
        """The place of the first token that is looked at."""
        return max(self._num_tokens - self._window, 0) if self._window else 0

    def _read(self, tokens: IntArray) -> None:
        """Start over from these tokens."""
        self._num_tokens = len(tokens)
        self._tokens = np.concatenate([tokens, np.zeros(len(tokens) // 2 + 64, dtype=np.int64)])
        self._grown = np.zeros_like(self._tokens)
        first, last = self._first(), len(tokens) - 1
        ends = self._places_of_last()
        self._ends, self._lengths = ends, np.ones_like(ends)
        growing = np.arange(len(ends))
        for length in range(1, min(self._max_length, last - first + 1)):
            before = tokens[last - length]
            if not len(growing) or self.breakers[before]:
                break
            growing = growing[ends[growing] - length >= first]
            growing = growing[tokens[ends[growing] - length] == before]
            self._lengths[growing] += 1

    def _append(self, token_id: int) -> None:
        if self._num_tokens == len(self._tokens):
            room = np.zeros_like(self._tokens)
            self._tokens, self._grown = np.concatenate([self._tokens, room]), np.zeros(2 * len(room), dtype=np.int64)
        self._tokens[self._num_tokens] = token_id
        self._num_tokens += 1
        following = self._ends + 1
        self._grown[following] = self._lengths
        self._ends = self._places_of_last()
        self._lengths = self._grown[self._ends] + 1
        self._grown[following] = 0

    def _places_of_last(self) -> IntArray:
        """Where the last token has stood before, ascending; nowhere, if it is a breaker."""
        last = self._num_tokens - 1
        if last < 1 or self.breakers[self._tokens[last]]:
            return self._tokens[:0]
        first = self._first()
        return np.flatnonzero(self._tokens[first:last] == self._tokens[last]) + first


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
