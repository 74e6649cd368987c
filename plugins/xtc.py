"""Logits processor `xtc`: now and then rules out the likeliest choices, where there are several good ones.

With some probability, of the tokens at or above a threshold only the least likely stays; what is below it stays too.
Whether it happens is a function of (seed, choice, position), so an answer can be had again, alone or in company.

Source: its author's proposal and code, "Exclude Top Choices", text-generation-webui pull request 6335, 2024.
"""

from __future__ import annotations

import math
import operator
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.params import Probability
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin
from .top_k import places

headrace_api = 1

STREAM = "xtc"


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    probability: Probability = 0.0
    """How often it happens (`xtc_probability` elsewhere). 0: off."""
    threshold: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """How likely a token must be to count as a good choice (`xtc_threshold` elsewhere). Above 0.5 it never happens."""


class ExcludeTopChoices:
    phase: ClassVar[Phase] = "truncate"
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: Params) -> None:
        assert context.sampling is not None
        self._probabilities = torch.zeros(context.sampling.num_slots, dtype=torch.float64)
        self._thresholds = torch.ones(context.sampling.num_slots, device=context.sampling.device)

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._probabilities[slot] = params.probability
        self._thresholds[slot] = params.threshold
        return params.probability > 0 and params.threshold <= 0.5

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        happens = (rows.uniforms(STREAM).cpu() < self._probabilities[rows.slots]).nonzero()[:, 0].tolist()
        if not happens:
            return logits
        thresholds = self._thresholds[rows.slots].tolist()
        for row in happens:
            exclude_top(logits[row], thresholds[row])
        return logits


def exclude_top(row: Tensor, threshold: float) -> None:
    """Of the good choices of one row `[vocab_size]`, let only the least likely stay, in place."""
    weights = row.softmax(-1)
    good = places(weights, operator.ge, threshold)
    if len(good) > 1:
        # Of equally likely ones the largest id stays.
        least = len(good) - 1 - int(weights[good].flip(0).argmin())
        row[good[:least]] = -math.inf
        row[good[least + 1 :]] = -math.inf


@plugin
def register_logits_processor(register: Register) -> None:
    register("xtc", ExcludeTopChoices, config=Params, params=Params, doc="Now and then, exclude the top choices.")
