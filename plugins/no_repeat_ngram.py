"""Logits processor `no-repeat-ngram`: no n tokens in a row come twice, in prompt and answer together.

Source: Paulus et al. 2017, A Deep Reinforced Model for Abstractive Summarization, arXiv:1705.04304, section 2.5; over
prompt and answer, as transformers does for models that continue a text.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ngram_size: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Tokens in a row that may not come again (`no_repeat_ngram_size` elsewhere). 0: off."""
    window_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """How many of the last tokens are looked at. 0: all."""


class NoRepeatNgram:
    phase: ClassVar[Phase] = "mask"

    def __init__(self, context: Context, options: Params) -> None:
        assert context.sampling is not None
        self._params = [Params()] * context.sampling.num_slots

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._params[slot] = params
        return params.ngram_size > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        vocab_size = logits.shape[1]
        places = [
            followers(last_tokens(rows, slot, self._params[slot].window_size), self._params[slot].ngram_size)
            + row * vocab_size
            for row, slot in enumerate(rows.slots)
        ]
        logits.view(-1).index_fill_(0, torch.cat(places), -math.inf)
        return logits


def last_tokens(rows: Rows, slot: int, window_size: int) -> Tensor:
    """The last *window_size* tokens of prompt and answer, int64; all of them if it is 0."""
    output = rows.history.output(slot)
    if window_size and len(output) >= window_size:
        return output[-window_size:]
    tokens = torch.cat([rows.history.prompt(slot), output])
    return tokens[-window_size:] if window_size else tokens


def followers(tokens: Tensor, ngram_size: int) -> Tensor:
    """What came after each earlier occurrence of the last *ngram_size* - 1 *tokens*; an id may come several times."""
    num_places = len(tokens) - ngram_size + 1
    if num_places <= 0:
        return tokens[:0]
    equal = torch.ones(num_places, dtype=torch.bool, device=tokens.device)
    for offset in range(1, ngram_size):
        equal &= tokens[ngram_size - 1 - offset : len(tokens) - offset] == tokens[-offset]
    return tokens[ngram_size - 1 :][equal]


@plugin
def register_logits_processor(register: Register) -> None:
    register("no-repeat-ngram", NoRepeatNgram, config=Params, params=Params, doc="No n tokens in a row come twice.")
