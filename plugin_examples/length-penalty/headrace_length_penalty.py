"""Logits processor `length-penalty`: after so many tokens, each further one makes the end likelier, exponentially.

Source: the exponential decay of length in transformers, `ExponentialDecayLengthPenalty`: from token *start* on, the
logit of an end token grows by |logit| · (decay ** (tokens beyond start) - 1).
"""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta, Struct

import headrace

headrace_api = 1

MOST = 1e6
"""What a logit is multiplied with at most: a float32 must hold it."""


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    start: Annotated[int, Meta(ge=0, le=2**20)] = 200
    """Tokens of the answer before which nothing happens."""
    decay: Annotated[float, Meta(ge=1, le=10)] = 1.0
    """How fast the end becomes likelier. 1: off."""


class LengthPenalty:
    phase = "penalty"
    speculative = True  # It counts tokens, and never looks which they are.

    def __init__(self, context, options):
        self.slots = {}

    def admit(self, slot, params, admitted):
        ends = [token for token in admitted.end_ids if token < 2**31]
        self.slots[slot] = (params.start, params.decay, torch.tensor(sorted(ends), dtype=torch.int64))
        return params.decay > 1 and bool(ends)

    def apply(self, logits, rows):
        for row, (slot, count) in enumerate(zip(rows.slots, rows.num_outputs, strict=True)):
            start, decay, ends = self.slots[slot]
            if count > start:
                factor = min(decay ** min(count - start, 2**10), MOST) - 1
                now = logits[row, ends]
                # A token that was ruled out stays so; |-inf| would make it the likeliest of all.
                logits[row, ends] = torch.where(now.isfinite(), now + now.abs() * factor, now)
        return logits


@headrace.plugin
def register_logits_processor(register):
    register("length-penalty", LengthPenalty, params=Params, doc="Makes the end likelier with each further token.")
