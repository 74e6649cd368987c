"""Models of the compiled kernels for the tests, and what the machine speaks."""

from __future__ import annotations

import importlib.util
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.core.kernels.native import dialect
from headrace.core.kernels.native.model import NativeModel
from headrace.core.model.load import load
from headrace.hooks.protocols import Architecture, Attention, Quantizer
from headrace.hooks.testing.attention import garbage
from headrace.plugins.native_attention import LARGEST_BYTE, NO_BYTES, NativeAttention, turned
from headrace.plugins.sdpa import Plan, Sdpa
from headrace.plugins.unquantized import Unquantized
from tests.model.tiny import open_checkpoint

BLOCK_SIZE = 16
DIALECTS = [name for name in ("amx", "avx512", "avx2", "portable") if dialect(name)]
KERNELS = [*(name + " 8" for name in DIALECTS if name not in NO_BYTES), *DIALECTS]
"""The dialects, first with a KV cache of 8 bits, where they have one, then of 16."""

pytestmark = pytest.mark.skipif(dialect() is None, reason="the kernels were not compiled: there is no C++ compiler")


ROOT = Path(__file__).parents[2]


def build_hook() -> Any:
    """The module that compiles the kernels when the package is built."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_native(
    path: Path,
    architecture: Architecture,
    *,
    quantizer: Quantizer | None = None,
    attention: Attention | None = None,
    kernels: str = KERNELS[0] if KERNELS else "",
    num_threads: int = 2,
    num_blocks: int = 60,
) -> NativeModel:
    """Load what lies at *path*; its KV cache is full of garbage but for the null block."""
    checkpoint = open_checkpoint(path)
    model = load(
        checkpoint.artifact,
        checkpoint,
        architecture,
        quantizer or Unquantized(),
        attention or native_attention(kernels),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dialect=kernels.split()[0],
        num_threads=num_threads,
    )
    checkpoint.close()
    assert isinstance(model, NativeModel)
    model.store.pool[1:] = garbage(model.store.pool.dtype)
    return model


def native_attention(kernels: str) -> NativeAttention:
    """What keeps the KV cache as one of `KERNELS` does."""
    name, _, bits = kernels.partition(" ")
    return NativeAttention(name, bits=int(bits or 16))


class Rounded(NativeAttention):
    """What the kernels do with a cache of 8 bits, in torch: queries and the weights of values have 8 bits too."""

    native = False

    def attend(
        self, query: Tensor, kv: Tensor, plan: Plan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        groups = eight_bits(turned(query), LARGEST_BYTE).unflatten(1, (kv.shape[2], -1)).permute(1, 2, 0, 3)
        out = torch.empty_like(query)
        for span in plan.spans:
            keys, values = self.gather(kv, span)
            units = self._parts(kv, 1)[1][span.table].transpose(0, 1).flatten(1)[:, None, None, : span.seq_len]
            scores = groups[:, :, span.rows] @ keys.mT * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if (mask := span.mask(window)) is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            by_tile = nn.functional.pad(weights * units, (0, -span.seq_len % 64)).unflatten(-1, (-1, 64))
            rounded = eight_bits(by_tile, 255).flatten(-2)[..., : span.seq_len] / units.clamp(min=1e-30)
            answer = rounded @ values / weights.sum(-1, keepdim=True)
            out[span.rows] = answer.flatten(0, 1).transpose(0, 1)
        return out


def eight_bits(x: Tensor, largest: float) -> Tensor:
    """*x* in units of which the largest of its last dimension is so many."""
    unit = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-30)
    return (x / unit).round() * unit


def same_attention(kernels: str) -> Sdpa:
    """The reference that rounds what the kernels' attention rounds visibly."""
    return Rounded(bits=8) if kernels.endswith(" 8") else Sdpa()


def ints(*numbers: int) -> array[int]:
    return array("i", numbers)
