"""All weights in one piece of memory, so that large pages hold them: a step walks through every one."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ...kv.pages import PAGE, advise
from .pack import Packed

ALIGNMENT: Final = 64
"""A line of the processor's cache."""


def gather(matrices: list[Packed | Tensor]) -> None:
    """Move all *matrices* into one piece of memory, in their order, and let go of where they were."""
    sizes = [-(-_nbytes(matrix) // ALIGNMENT) * ALIGNMENT for matrix in matrices]
    memory = torch.empty(sum(sizes) + PAGE, dtype=torch.uint8)
    advise(memory)
    at = -memory.data_ptr() % PAGE
    for i, (matrix, size) in enumerate(zip(matrices, sizes, strict=True)):
        tensor = matrix.data if isinstance(matrix, Packed) else matrix
        place = memory[at : at + _nbytes(matrix)].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        matrices[i] = _moved(matrix, place)
        at += size


def _nbytes(matrix: Packed | Tensor) -> int:
    return matrix.nbytes


def _moved(matrix: Packed | Tensor, place: Tensor) -> Packed | Tensor:
    if not isinstance(matrix, Packed):
        return place
    return Packed(storage=matrix.storage, n=matrix.n, k=matrix.k, data=place, bias=matrix.bias)
