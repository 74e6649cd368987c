"""Logits processor `typical`: keeps the tokens whose surprise is nearest to what is to be expected, up to a sum.

The vocabulary is never sorted: bins find where the sum is reached, and only the tokens of that bin are.

Source: Meister et al. 2022, Locally Typical Sampling, arXiv:2202.00666, section 4; ties at the border all stay.
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

NUM_BINS, BINS_PER_UNIT = 4096, 64
"""Bins of distances from the expected surprise, in nats; the last holds all that is further than 64."""


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the most typical tokens whose probabilities reach this sum (`typical_p` elsewhere). 1: off."""


class Typical:
    phase: ClassVar[Phase] = "truncate"
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: Params) -> None:
        assert context.sampling is not None
        self._p = torch.ones(context.sampling.num_slots, device=context.sampling.device)

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._p[slot] = params.p
        return params.p < 1

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        # Row by row: what a row needs in between then stays in the processor's cache.
        for row, goal in zip(logits, self._p[rows.slots].tolist(), strict=True):
            scores = row.log_softmax(-1)
            weights = scores.exp()
            # A token that is ruled out has no share in the entropy, and is infinitely far from it.
            entropy = -(weights * scores.clamp(min=-1e30)).sum()
            shift = scores.neg_().sub_(entropy).abs_()
            row.masked_fill_(shift > border(shift, weights.double(), goal), -math.inf)
        return logits


def border(shift: Tensor, weights: Tensor, goal: float) -> Tensor:
    """How far from the expected surprise the last token lies that the sum needs.

    Args:
        shift: `[vocab_size]`, not negative.
        weights: `[vocab_size]` float64, the probabilities.
    """
    bins = (shift * BINS_PER_UNIT).clamp_(max=NUM_BINS - 1).long()
    sums = torch.bincount(bins, weights=weights, minlength=NUM_BINS).cumsum(0)
    hit = min(int((sums < goal).sum()), NUM_BINS - 1)
    inside = (bins == hit).nonzero()[:, 0]
    if not len(inside):  # All together, rounded, make up less than the goal.
        return shift.amax()
    values, order = shift[inside].sort()
    before = sums[hit] - weights[inside].sum()
    index = (before + weights[inside[order]].cumsum(0) < goal).sum()
    return values[index.clamp(max=len(values) - 1)]


@plugin
def register_logits_processor(register: Register) -> None:
    register("typical", Typical, config=Params, params=Params, doc="Keep the most typical tokens.")
