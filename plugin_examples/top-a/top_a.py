"""Logits processor `top-a`: keeps tokens at least as likely as `ratio · p_max ** power`."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from msgspec import Meta, Struct

import headrace

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2
    power: Annotated[float, Meta(ge=0, le=10)] = 2.0


class TopA:
    phase = "truncate"

    def __init__(self, context, options):
        self.ratio = torch.zeros(context.sampling.num_slots)
        self.power = torch.ones(context.sampling.num_slots)

    def admit(self, slot, params, admitted):
        self.ratio[slot], self.power[slot] = params.ratio, params.power
        return params.ratio > 0

    def apply(self, logits, rows):
        probabilities = logits.softmax(-1)
        likeliest = probabilities.amax(-1, keepdim=True)
        limit = self.ratio[rows.slots, None] * likeliest ** self.power[rows.slots, None]
        return logits.masked_fill_(probabilities < limit, -math.inf)


@headrace.plugin
def register_logits_processor(register):
    register("top-a", TopA, params=Params, doc="Keep tokens likely enough, measured by a power of the likeliest.")
