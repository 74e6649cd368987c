"""Memory in pages of 2 MiB where the system has them: a step walks through all weights, and each page costs a look-up.

Only an advice: where it is not taken, nothing changes but time.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from .pack import Packed

PAGE: Final = 2 << 20
MADV_HUGEPAGE: Final = 14
ALIGNMENT: Final = 64
"""A line of the processor's cache."""


def advise(memory: Tensor) -> None:
    """Ask for large pages under *memory*, from its first whole one to its last."""
    if sys.platform != "linux":
        return
    start = -(-memory.data_ptr() // PAGE) * PAGE
    size = (memory.data_ptr() + memory.numel() * memory.element_size() - start) // PAGE * PAGE
    if size > 0:
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE)


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
