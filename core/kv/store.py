"""The KV cache's tensors: one pool, layer by layer, allocated once and touched as blocks are first written.

Which block belongs to whom is `blocks`' affair; this file only holds, views and copies.
"""

from __future__ import annotations

import math
import sys
from typing import Final

import torch
from torch import Tensor

from .pages import PAGE, Ahead, advise

ALIGNMENT: Final = 64
"""Numbers: no vector of a row crosses a line of the processor's cache."""


class KVStore:
    """Keys and values, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, within as attention likes.

    *head_dim* counts all that attention keeps of a head, scales too.

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
        shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
        apart = _apart(math.prod(shape), num_layers, PAGE // dtype.itemsize)
        # Not zeroed: the system maps pages of an untouched allocation only when they are written.
        self.memory: Tensor = torch.empty(num_layers * apart, dtype=dtype, device=device)
        if self.memory.device.type == "cpu":
            advise(self.memory)
        strides = torch.empty(shape, device="meta").stride()
        self.pool: Tensor = self.memory.as_strided(
            (num_blocks, num_layers, *shape[1:]), (strides[0], apart, *strides[1:])
        )
        self.pool[0] = 0

    def layer(self, index: int) -> Tensor:
        """A view of one layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, contiguous."""
        return self.pool[:, index]

    def ahead(self, num_tokens: int) -> Ahead | None:
        """What makes memory ready for that many tokens beyond those in use; None where that is not worth a thread."""
        num_blocks, num_layers, _, _, block_size, _ = self.pool.shape
        size = self.pool.element_size()
        if sys.platform != "linux" or self.memory.device.type != "cpu" or self.pool.stride(1) * size < PAGE:
            return None
        return Ahead(
            self.memory.data_ptr(),
            apart=self.pool.stride(1) * size,
            num_layers=num_layers,
            block_bytes=self.pool.stride(0) * size,
            num_blocks=num_blocks,
            num_ahead=-(-num_tokens // block_size),
        )

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), one pair after the other."""
        for source, target in pairs:
            self.pool[target] = self.pool[source]


def _apart(size: int, num_layers: int, page: int) -> int:
    """From the start of one layer to the next, for layers of *size* numbers.

    Now and then a block reaches a new page in each layer. Were that the same block for all, the system would have to
    map and clear a page a layer within one step, 60 MB for 30 layers; so layers begin at different places of a page.
    """
    if size < page:
        return size
    return -(-size // page) * page + page // num_layers // ALIGNMENT * ALIGNMENT
