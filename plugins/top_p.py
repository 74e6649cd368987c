"""Logits processor `top-p`: keeps the smallest set of likeliest tokens whose probabilities reach a sum.

The vocabulary is never sorted. A few of the largest logits are enough for almost every row; in a flat one, bins find
where the sum is reached, and only the logits of that bin are sorted.

Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv:1904.09751, section 3.1.
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
from .top_k import drop_equals, keep_from, keep_likeliest

headrace_api = 1

WIDTH = 64
"""How many of the largest logits are looked at first."""
NUM_BINS, BINS_PER_UNIT = 4096, 64
"""Bins of logits below the largest; the last holds what is less than e**-63 times as likely."""
ROUNDING = 1e-6
"""Sums of float32 probabilities are this exact: a sum that should be 0.8 must count as having reached it."""


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    p: Probability = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach this sum."""


class TopP:
    phase: ClassVar[Phase] = "truncate"
    fused: ClassVar[Mapping[str, str]] = {"top_p": "p"}
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._p = torch.ones(context.sampling.num_slots, dtype=torch.float64, device=context.sampling.device)

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._p[slot] = params.p
        return params.p < 1

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        sums = self._p[rows.slots] - ROUNDING
        width = min(WIDTH, logits.shape[1])
        values, ids = logits.topk(width)
        probabilities = values.softmax(-1)
        # A row that was truncated before has all that is left of it in *values*; the others need the whole row's sum.
        longer = (values[:, -1] > -math.inf).nonzero()[:, 0]
        weights = (logits if len(longer) == len(logits) else logits[longer]).softmax(-1)
        probabilities[longer] = weights.gather(1, ids[longer])
        before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
        # What lacks something before it is a prefix, for the sums ascend.
        counts = (before < sums[:, None]).sum(-1).clamp(min=1)
        flat = (counts == width) & (values[:, -1] > -math.inf) & (width < logits.shape[1])
        steep = (~flat).nonzero()[:, 0]
        if len(steep):
            keep_likeliest(logits, steep.tolist(), values[steep], counts[steep].tolist())
        for index, row in enumerate(longer.tolist()):
            if flat[row]:
                keep_flat(logits[row], weights[index].double(), float(sums[row]))
        return logits


def keep_flat(row: Tensor, probabilities: Tensor, goal: float) -> None:
    """Cut one row `[vocab_size]`, in place, where the sum of its float64 *probabilities* reaches *goal*."""
    bins = ((row.max() - row) * BINS_PER_UNIT).clamp(max=NUM_BINS - 1).long()
    masses = torch.bincount(bins, weights=probabilities, minlength=NUM_BINS)
    before = masses.cumsum(0) - masses
    border = int((before < goal).sum()) - 1
    inside = (bins == border).nonzero()[:, 0]
    values, order = row[inside].sort(descending=True)
    steps = probabilities[inside[order]]
    count = int((before[border] + steps.cumsum(0) - steps < goal).sum().clamp(min=1))
    keep_from(row[None], [0], values[count - 1 : count])
    if count < len(values) and values[count] == values[count - 1]:
        drop_equals(row, int((bins < border).sum()) + count)


@plugin
def register_logits_processor(register: Register) -> None:
    register("top-p", TopP, params=Params, doc="Keep the likeliest tokens whose probabilities reach a sum.")
