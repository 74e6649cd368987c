"""Logits processor `min-p`: keeps tokens that are likely enough, measured by the likeliest.

Source: Nguyen et al. 2024, Turning Up the Heat: Min-p Sampling, arXiv:2407.01082, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from msgspec import Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.params import Probability
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin
from .top_k import keep_from

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    p: Probability = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""


class MinP:
    phase: ClassVar[Phase] = "truncate"
    fused: ClassVar[Mapping[str, str]] = {"min_p": "p"}
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._margins = torch.zeros(context.sampling.num_slots, device=context.sampling.device)

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        if params.p == 0:
            return False
        # A ratio of probabilities is a difference of logits, so no softmax is needed.
        self._margins[slot] = math.log(params.p)
        return True

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        keep_from(logits, list(range(len(rows.slots))), logits.amax(-1) + self._margins[rows.slots])
        return logits


@plugin
def register_logits_processor(register: Register) -> None:
    register("min-p", MinP, params=Params, doc="Keep tokens that are likely enough, measured by the likeliest.")
