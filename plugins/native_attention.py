"""Attention `native`: the compiled kernels' KV cache, in float16 with turned keys; and `auto`, which chooses.

The compiled line reads and writes the cache itself. The methods here say the same in torch: they are what its layout
means, and run where a stranger's part stands between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hooks.protocols import Attention, Context, Register
from ..hooks.registry import plugin
from .sdpa import Plan, Sdpa, Span

if TYPE_CHECKING:
    from torch import Tensor

headrace_api = 1

LARGEST_HALF = 65504.0
MAX_HEAD_DIM = 512


class NativeAttention(Sdpa):
    """Keys of a block and head lie as `[head_dim, block_size]`, values as `[block_size, head_dim]`, both in float16."""

    native = True
    kv_dtype = "float16"

    def supports(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        window: int | None,
        softcap: float | None,
        device: str,
    ) -> str | None:
        """Heads of whole vectors, at most 48 query heads for each KV head, on a CPU with the compiled library."""
        from ..core.kernels.native import dialect

        if dialect() is None:
            return "the compiled kernels were not built"
        if device != "cpu":
            return f"it runs on a cpu, not on {device}"
        if head_dim % 16 or head_dim > MAX_HEAD_DIM:
            return f"head_dim must be a multiple of 16 up to {MAX_HEAD_DIM}, got {head_dim}"
        if num_heads % num_kv_heads or num_heads // num_kv_heads > 48:
            return f"num_heads ({num_heads}) must be 1 to 48 times num_kv_heads ({num_kv_heads})"
        return None

    def write(self, kv: Tensor, key: Tensor, value: Tensor, plan: Plan) -> None:
        """Store keys and values, each `[num_tokens, num_kv_heads, head_dim]`."""
        keys, values = _halves(kv)
        keys[plan.blocks, :, :, plan.offsets] = key.clamp(-LARGEST_HALF, LARGEST_HALF).to(kv.dtype)
        values[plan.blocks, :, plan.offsets] = value.clamp(-LARGEST_HALF, LARGEST_HALF).to(kv.dtype)

    def gather(self, kv: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, each `[num_kv_heads, 1, seq_len, head_dim]` float32."""
        keys, values = _halves(kv)
        found = (keys[span.table].transpose(-1, -2), values[span.table])
        together = [x.transpose(0, 1).flatten(1, 2)[:, None, : span.seq_len].float() for x in found]
        return together[0], together[1]


def _halves(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views `[num_blocks, num_kv_heads, head_dim, block_size]` of keys, `[…, block_size, head_dim]` of values."""
    block_size, head_dim = kv.shape[-2:]
    return kv[:, 0].reshape(*kv.shape[:1], kv.shape[2], head_dim, block_size), kv[:, 1]


def _native(context: Context, options: None) -> NativeAttention:
    return NativeAttention()


def _auto(context: Context, options: None) -> Attention:
    program, attention = context.program, NativeAttention()
    if context.kernels is None or program is None or context.block_size % 16:
        return Sdpa()
    reason = attention.supports(
        head_dim=program.head_dim,
        num_heads=program.num_heads,
        num_kv_heads=program.num_kv_heads,
        window=None,
        softcap=None,
        device=context.device,
    )
    return attention if reason is None else Sdpa()


@plugin
def register_attention(register: Register) -> None:
    """Offer `auto` and `native`."""
    register("auto", _auto, doc="`native` where the compiled kernels run and the model's heads allow it, else `sdpa`.")
    register("native", _native, doc="The compiled kernels' cache in float16.")
