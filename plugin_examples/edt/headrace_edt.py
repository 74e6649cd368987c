"""Sampler `edt`: draws at a temperature that follows the model's doubt: cool where it is sure, warm where it wavers.

Source: Zhang et al. 2024, EDT: Improving Large Language Models' Generation by Entropy-based Dynamic Temperature
Sampling, arXiv:2403.14541, section 3: T = T0 · 0.8 ** (theta / entropy), with the entropy in nats.
"""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta, Struct

import headrace

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    highest: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """T0, the temperature where the model has no idea."""
    theta: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """How much its doubt counts. 0: the temperature is always the highest."""


class Edt:
    speculative = True  # It never looks at the tokens so far.

    def __init__(self, context, options):
        self.highest = torch.ones(context.sampling.num_slots)
        self.theta = torch.zeros(context.sampling.num_slots)

    def admit(self, slot, params, admitted):
        self.highest[slot], self.theta[slot] = params.highest, params.theta

    def sample(self, logits, uniforms, rows):
        weights = probabilities(logits, self.highest[rows.slots], self.theta[rows.slots])
        sums = weights.cumsum(-1, dtype=torch.float64)
        # The first token whose running sum exceeds the number: one that adds nothing to the sum is never the first.
        return torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)[:, 0]


def probabilities(logits, highest, theta):
    """What is drawn with, `[num_rows, vocab_size]` float32."""
    log_p = logits.log_softmax(-1)
    # A token that is ruled out adds nothing, where 0 · -inf would be NaN.
    entropy = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)
    temperature = highest * 0.8 ** (theta / entropy.clamp(min=1e-6))
    # The likeliest token stays at 0, however cold it becomes.
    log_p -= log_p.amax(-1, keepdim=True)
    return (log_p / temperature.clamp(min=1e-6)[:, None]).softmax(-1)


@headrace.plugin
def register_sampler(register):
    register("edt", Edt, config=Params, params=Params, doc="Draws at a temperature that follows the model's doubt.")
