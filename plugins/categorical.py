"""Sampler `categorical`: the draw in proportion to probability, by inverting the cumulative distribution.

Sums are taken in two levels, over blocks of tokens and then inside the block that was hit, for a running sum over the
whole vocabulary in float64 costs more than the softmax. Each row is worked out from that row alone.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..hooks.protocols import Context, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1

BLOCK = 128
LARGEST = 1 - 2.0**-53
"""The largest float64 under 1."""


class Categorical:
    speculative: ClassVar[bool] = True
    fused: ClassVar[str] = "categorical"

    def __init__(self, context: Context, options: None) -> None:
        pass

    def sample(self, logits: Tensor, uniforms: Tensor, rows: Rows) -> Tensor:
        return draw(logits.softmax(-1), uniforms)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids `[num_rows]` int64, each in proportion to its weight.

    Args:
        weights: `[num_rows, vocab_size]` float32, not negative, at least one in each row above 0.
        uniforms: `[num_rows]` float64 in [0, 1).
    """
    vocab_size = weights.shape[1]
    whole = vocab_size // BLOCK
    blocks = weights[:, : whole * BLOCK].view(len(weights), whole, BLOCK).sum(-1)
    rest = weights[:, whole * BLOCK :].sum(-1, keepdim=True)
    block, fraction = invert(torch.cat([blocks, rest], 1), uniforms)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=vocab_size - 1)) * (ids < vocab_size)
    index, _ = invert(inside, fraction)
    return block * BLOCK + index


def invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the running sum of the *weights* each uniform falls.

    Args:
        weights: `[num_rows, width]`, non-negative, at least one in each row above 0.
        uniforms: `[num_rows]` float64 in [0, 1).

    Returns:
        The index of a weight above 0, `[num_rows]` int64, and how far into that weight, `[num_rows]` float64 in [0, 1).
    """
    sums = weights.cumsum(1, dtype=torch.float64)
    targets = uniforms[:, None] * sums[:, -1:]
    # The first sum that exceeds the target. It does so by its own weight, which is therefore not 0; and the last sum
    # always does, for the product of a number and the largest float64 under 1 rounds to less than the number.
    index = torch.searchsorted(sums, targets, right=True)
    weight = weights.gather(1, index).double()
    before = sums.gather(1, index) - weight
    fraction = ((targets - before) / weight).clamp(0, LARGEST)
    return index[:, 0], fraction[:, 0]


@plugin
def register_sampler(register: Register) -> None:
    register("categorical", Categorical, doc="Draw in proportion to probability.")
