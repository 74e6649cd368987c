"""Models of the compiled kernels for the tests, and what the machine speaks."""

from __future__ import annotations

import importlib.util
from array import array
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from headrace.core.kernels.native import dialect
from headrace.core.kernels.native.model import NativeModel
from headrace.core.model.load import load
from headrace.hooks.protocols import Architecture, Attention, Quantizer
from headrace.hooks.testing.attention import garbage
from headrace.plugins.native_attention import NativeAttention
from headrace.plugins.sdpa import Plan, Sdpa
from headrace.plugins.unquantized import Unquantized
from tests.model.tiny import open_checkpoint

BLOCK_SIZE = 16
DIALECTS = [name for name in ("amx", "avx512", "avx2", "portable") if dialect(name)]

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
    dialect: str = DIALECTS[0] if DIALECTS else "",
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
        attention or NativeAttention(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dialect=dialect,
        num_threads=num_threads,
    )
    checkpoint.close()
    assert isinstance(model, NativeModel)
    model.store.pool[1:] = garbage(model.store.pool.dtype)
    return model


class Rounded(Sdpa):
    """What `amx` attends with, in torch: queries, keys and values in bfloat16. Weights of values are not rounded."""

    def write(self, kv: Tensor, key: Tensor, value: Tensor, plan: Plan) -> None:
        super().write(kv, key.bfloat16().float(), value.bfloat16().float(), plan)

    def attend(self, query: Tensor, kv: Tensor, plan: Plan, **how: Any) -> Tensor:
        return super().attend(query.bfloat16().float(), kv, plan, **how)


def same_attention(dialect: str) -> Sdpa:
    """The reference that rounds what the kernels' attention rounds visibly."""
    return Rounded() if dialect == "amx" else Sdpa()


def ints(*numbers: int) -> array[int]:
    return array("i", numbers)
