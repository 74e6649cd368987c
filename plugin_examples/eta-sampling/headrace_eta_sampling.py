"""Logits processor `eta-sampling`: keeps tokens above a threshold that falls as the model becomes less sure.

Source: Hewitt, Manning, Liang 2022, Truncation Sampling as Language Model Desmoothing, arXiv:2210.15191, section 4.2:
eta = min(epsilon, sqrt(epsilon) * exp(-entropy)), and the likeliest token always stays.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from msgspec import Meta, Struct

import headrace

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    epsilon: Annotated[float, Meta(ge=0, lt=1)] = 9e-4
    """The threshold where the model is sure; the paper tries 2e-3 down to 2e-4. 0: off."""


class EtaSampling:
    phase = "truncate"
    speculative = True  # It never looks at the tokens so far.

    def __init__(self, context, options):
        self.epsilon = torch.zeros(context.sampling.num_slots, device=context.sampling.device)

    def admit(self, slot, params, admitted):
        self.epsilon[slot] = params.epsilon
        return params.epsilon > 0

    def apply(self, logits, rows):
        log_p = logits.log_softmax(-1)
        # A token that is ruled out has the probability 0 and adds nothing, where 0 · -inf would be NaN.
        entropy = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
        epsilon = self.epsilon[rows.slots, None]
        eta = torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-entropy))
        out = log_p < torch.minimum(eta.log(), log_p.amax(-1, keepdim=True))
        return logits.masked_fill_(out, -math.inf)


@headrace.plugin
def register_logits_processor(register):
    register("eta-sampling", EtaSampling, params=Params, doc="Keeps tokens above a threshold that falls with entropy.")
