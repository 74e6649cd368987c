"""Attention `native`: the compiled kernels' KV cache, in numbers of 16 bits; and `auto`, which chooses.

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

WHOLE = (32767.0, 8191.0)
"""What the norm of a key, and the largest feature of a value, becomes."""
MAX_HEAD_DIM = 512


class NativeAttention(Sdpa):
    """Keys and values are integers, each token's with a float32 scale of its own; for `amx` bfloat16, with the scale 1.

    Args:
        dialect: of the kernels that share the cache.

    Of a block and head, keys lie as `[head_dim / 2, block_size, 2]`, values as `[block_size / 2, head_dim, 2]`, and
    their scales, `[block_size]`, behind them. No sum that the kernels make of them leaves 32 bits.
    """

    native = True
    kv_dtype = "int16"
    kv_extra = 2

    def __init__(self, dialect: str | None = None) -> None:
        self._floats = dialect == "amx"

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
        import torch

        for i, (rows, size) in enumerate(((key, key.norm(dim=-1)), (value, value.abs().amax(dim=-1)))):
            numbers, scales = _parts(kv, i)
            if self._floats:
                found = rows.to(torch.bfloat16).view(torch.int16)
                scales[plan.blocks, :, plan.offsets] = 1.0
            else:
                by = torch.where((size > 0) & size.isfinite(), WHOLE[i] / size, 0.0)
                found = (rows * by[..., None]).nan_to_num().round().to(torch.int16)
                scales[plan.blocks, :, plan.offsets] = size / WHOLE[i]
            if i == 0:
                numbers[plan.blocks, :, :, plan.offsets] = found.reshape(*found.shape[:-1], -1, 2)
            else:
                numbers[plan.blocks, :, plan.offsets // 2, :, plan.offsets % 2] = found

    def gather(self, kv: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, each `[num_kv_heads, 1, seq_len, head_dim]` float32."""
        import torch

        (keys, key_scales), (values, value_scales) = _parts(kv, 0), _parts(kv, 1)
        if self._floats:
            keys, values = (x.view(torch.bfloat16).float() for x in (keys, values))
        found = (
            keys[span.table].transpose(2, 3).flatten(3) * key_scales[span.table][..., None],
            values[span.table].transpose(3, 4).flatten(2, 3) * value_scales[span.table][..., None],
        )
        together = [x.transpose(0, 1).flatten(1, 2)[:, None, : span.seq_len] for x in found]
        return together[0], together[1]


def _parts(kv: Tensor, which: int) -> tuple[Tensor, Tensor]:
    """Of a layer's keys (0) or values (1): views of the numbers and of the scales, `[num_blocks, num_kv_heads, …]`.

    Numbers are `[head_dim / 2, block_size, 2]` of keys, `[block_size / 2, head_dim, 2]` of values.
    """
    import torch

    block_size, head_dim = kv.shape[-2], kv.shape[-1] - NativeAttention.kv_extra
    flat = kv[:, which].flatten(-2)
    integers, scales = flat[..., : block_size * head_dim], flat[..., block_size * head_dim :].view(torch.float32)
    shape = (head_dim // 2, block_size, 2) if which == 0 else (block_size // 2, head_dim, 2)
    return integers.reshape(*integers.shape[:-1], *shape), scales


def _native(context: Context, options: None) -> NativeAttention:
    return NativeAttention(context.kernels)


def _auto(context: Context, options: None) -> Attention:
    program, attention = context.program, NativeAttention(context.kernels)
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
    register("native", _native, doc="The compiled kernels' cache, in numbers of 16 bits.")
