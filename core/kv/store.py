"""The KV cache's tensors: one pool, block-major, allocated once and touched as blocks are first written.

Which block belongs to whom is `blocks`' affair; this file only holds, views and copies.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVStore:
    """Keys and values, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, within as attention likes.

    Block 0 is the null block: it belongs to nobody, pads tables and holds zeros. All other slots hold garbage (NaN
    included) until they are written, so a reader must leave out what it does not need, never multiply it with 0.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # A layer's blocks lie together: a step reads the cache layer by layer, and the blocks of a sequence are often
        # neighbours, which the processor can foresee.
        shape = (num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim)
        # Not zeroed: the system maps pages of an untouched allocation only when they are written.
        self.pool: Tensor = torch.empty(shape, dtype=dtype, device=device).transpose(0, 1)
        self.pool[0] = 0

    def layer(self, index: int) -> Tensor:
        """A view of one layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, contiguous."""
        return self.pool[:, index]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), one pair after the other."""
        for source, target in pairs:
            self.pool[target] = self.pool[source]
