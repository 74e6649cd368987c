"""The plainest attention there is, and weights as they are: what other implementations are compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...core.kernels import Batch
from ..protocols import Linear


def place(batch: Batch, sequence: int, position: int) -> tuple[int, int]:
    """Block, and slot in it, of a token."""
    return int(batch.block_tables[sequence][position // batch.block_size]), position % batch.block_size


class PlainAttention:
    """One head of one token after the other, in float64. Implements `protocols.Attention`."""

    def supports(self, **shape: Any) -> str | None:
        """Everything."""
        return None

    def plan(self, batch: Batch) -> Batch:
        """The batch itself."""
        return batch

    def write(self, kv: Tensor, key: Tensor, value: Tensor, plan: Batch) -> None:
        """One token after the other."""
        for sequence in range(len(plan.seq_lens)):
            for row in range(plan.cu_tokens[sequence], plan.cu_tokens[sequence + 1]):
                block, offset = place(plan, sequence, int(plan.positions[row]))
                kv[block, 0, :, offset], kv[block, 1, :, offset] = key[row], value[row]

    def attend(
        self, query: Tensor, kv: Tensor, plan: Batch, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """By the definition."""
        out = torch.empty_like(query)
        for sequence in range(len(plan.seq_lens)):
            for row in range(plan.cu_tokens[sequence], plan.cu_tokens[sequence + 1]):
                position = int(plan.positions[row])
                first = 0 if window is None else max(0, position - window + 1)
                places = [place(plan, sequence, each) for each in range(first, position + 1)]
                blocks, offsets = [block for block, _ in places], [offset for _, offset in places]
                keys, values = (
                    kv[blocks, :, :, offsets].double().repeat_interleave(query.shape[1] // kv.shape[2], dim=2).unbind(1)
                )
                scores = torch.einsum("hd,khd->hk", query[row].double(), keys) * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(out.dtype)
        return out


class PlainQuantizer:
    """Implements `protocols.Quantizer`."""

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """The matrix as it is."""
        return partial(linear, weight=weight, bias=bias)
