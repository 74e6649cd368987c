"""Logits processor `top-n-sigma`: keeps tokens whose logit lies within n standard deviations of the largest.

What stays does not depend on the temperature. Tokens that were ruled out before are not counted; to measure all of
them, list it before the other processors of the phase `truncate`.

Source: Tang et al. 2024, Top-nσ: Not All Logits Are You Need, arXiv:2411.07641, section 3.
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
from .top_k import keep_from

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    n: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Standard deviations below the largest logit that are kept (`top_n_sigma` elsewhere). 0: off."""


class TopNSigma:
    phase: ClassVar[Phase] = "truncate"
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: Params) -> None:
        assert context.sampling is not None
        self._n = torch.zeros(context.sampling.num_slots, device=context.sampling.device)

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._n[slot] = params.n
        return params.n > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        sigmas = logits.std(-1, correction=0)
        for row in (~sigmas.isfinite()).nonzero()[:, 0].tolist():
            sigmas[row] = logits[row][logits[row] > -math.inf].std(correction=0)
        keep_from(logits, list(range(len(logits))), logits.amax(-1) - self._n[rows.slots] * sigmas)
        return logits


@plugin
def register_logits_processor(register: Register) -> None:
    register("top-n-sigma", TopNSigma, config=Params, params=Params, doc="Keep logits near the largest.")
