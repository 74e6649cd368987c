"""Logits processor `typical`: keeps the tokens whose surprise is nearest to what is to be expected, up to a sum.

The vocabulary is never sorted. In most rows few tokens are anywhere near the border, and those are; in a flat one, bins
find where the sum is reached, and only the tokens of that bin are sorted.

Source: Meister et al. 2022, Locally Typical Sampling, arXiv:2202.00666, section 4; ties at the border all stay.
"""

from __future__ import annotations

import math
import operator
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin
from .top_k import keep_from, places

headrace_api = 1

NUM_BINS, BINS_PER_UNIT = 4096, 64
"""Bins of distances from the expected surprise, in nats; the last holds all that is further than 64."""
NEAR, MAX_NEAR = 6.0, 2048
"""Nats from the expected surprise within which the border is looked for first, where it is not a choice of more."""
LARGEST = 3e38
"""No logit is larger."""
LEAST = -80.0
"""The logarithm of a share that no sum of floats notices."""


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
            keep_typical(row, goal)
        return logits


def keep_typical(row: Tensor, goal: float) -> None:
    """Cut one row `[vocab_size]`, in place, to the most typical tokens whose probabilities reach *goal*."""
    scores = row.log_softmax(-1)
    # A token that is ruled out has next to no share in the entropy, and is infinitely far from it. Where it underflows,
    # an exponential takes ten times as long.
    clear = scores.clamp(min=LEAST)
    weights = clear.exp()
    entropy = -clear.mul_(weights).sum()
    expected = float(entropy)
    # As many equally likely tokens have this entropy.
    if expected <= math.log(MAX_NEAR):
        near = places(scores, operator.ge, -expected - NEAR)
        shift = distances(scores[near], entropy)
        limit = border_of_few(shift, weights[near], goal)
        if limit <= NEAR:
            kept = near[shift <= limit]
            values = row[kept]
            row.fill_(-math.inf)[kept] = values
            return
    shift = distances(scores, entropy)
    limit = border(shift, weights.double(), goal)
    # Several times as fast as a comparison and a masked fill.
    nearness = shift.neg_()
    keep_from(nearness[None], [0], torch.tensor([-limit], device=row.device))
    torch.minimum(row, nearness.add_(LARGEST), out=row)


def border_of_few(shift: Tensor, weights: Tensor, goal: float, *, before: float = 0.0) -> float:
    """As `border`, quicker for few tokens; infinite where they do not make up the goal with what is *before* them."""
    distance, weight = shift.cpu().numpy(), weights.cpu().numpy()
    order = distance.argsort()
    index = int((before + weight[order].cumsum(dtype=np.float64)).searchsorted(goal))
    return float(distance[order[index]]) if index < len(order) else math.inf


def distances(scores: Tensor, entropy: Tensor) -> Tensor:
    """How far each token's surprise is from what is to be expected, in nats. *scores* are used up."""
    return scores.neg_().sub_(entropy).abs_()


def border(shift: Tensor, weights: Tensor, goal: float) -> float:
    """How far from the expected surprise the last token lies that the sum needs.

    Args:
        shift: `[num_tokens]`, not negative.
        weights: `[num_tokens]` float64, the probabilities.
    """
    bins = (shift * BINS_PER_UNIT).clamp_(max=NUM_BINS - 1).long()
    masses = torch.zeros(NUM_BINS, dtype=torch.float64, device=shift.device).scatter_add_(0, bins, weights)
    sums = masses.cumsum(0)
    hit = min(int(torch.searchsorted(sums, goal)), NUM_BINS - 1)
    inside = places(bins, operator.eq, hit)
    if not len(inside):  # All together, rounded, make up less than the goal.
        return float(shift.amax())
    values = shift[inside]
    limit = border_of_few(values, weights[inside], goal, before=float(sums[hit] - masses[hit]))
    return limit if limit < math.inf else float(values.amax())


@plugin
def register_logits_processor(register: Register) -> None:
    register("typical", Typical, config=Params, params=Params, doc="Keep the most typical tokens.")
