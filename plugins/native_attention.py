"""Attention `native`: the compiled kernels' KV cache, in integers of 16 bits or of 8; and `auto`, which chooses.

The compiled line reads and writes the cache itself. The methods here say the same in torch: they are what its layout
means, and run where a stranger's part stands between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from ..hooks.protocols import Attention, Context, Register
from ..hooks.registry import plugin
from .sdpa import Plan, Sdpa, Span

if TYPE_CHECKING:
    from torch import Tensor

headrace_api = 1

KEY_NORM, LARGEST_VALUE = 32767.0, 8191.0
"""Of 16 bits: what the norm of a key, and the largest feature of a value, becomes."""
LARGEST_BYTE = 127.0
"""Of 8 bits: what the largest feature becomes, of keys after they were turned."""
MAX_HEAD_DIM = 512
BYTES_DIALECTS = ("amx", "avx512")
"""Instruction sets for which 8 bits are the faster ones."""
NO_BYTES = ("avx2",)
"""Those that cannot sum products of 8 bits."""


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    bits: of the KV cache's integers, 8 or 16. 8 take half the memory; the instruction set `avx2` has none. Unset: 8
        with `amx` and `avx512` where weights have fewer than 16 bits on average, else 16.
    """

    bits: Literal[8, 16] | None = None


class NativeAttention(Sdpa):
    """Keys and values are integers, each token's with a float32 scale of its own.

    Args:
        dialect: of the kernels that share the cache; None: their best.
        bits: of an integer, 8 or 16.

    Of a block and head, keys lie as `[head_dim / n, block_size, n]`, values as `[block_size / n, head_dim, n]`, n
    being the integers of 4 bytes, and their scales, `[block_size]`, behind them. No sum that the kernels make of them
    leaves 32 bits. Keys of 8 bits are turned by a Hadamard matrix first, and so are queries: a few large features would
    leave the others too few of 8 bits. (QuaRot, Ashkboos et al., 2024, does so with keys.)
    """

    native = True

    def __init__(self, dialect: str | None = None, *, bits: int = 16) -> None:
        self._dialect = dialect
        self.bits = bits
        self.kv_dtype = f"int{bits}"
        self.kv_extra = 32 // bits

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

        found = self._dialect or dialect()
        if found is None:
            return "the compiled kernels were not built"
        if self.bits == 8 and found in NO_BYTES:
            return f"the kernels {found} have no cache of 8 bits; set the option bits to 16"
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

        from ..core.kernels.native.abi import SMALL

        if self.bits == 8:
            parts = [(rows, rows.abs().amax(dim=-1), LARGEST_BYTE) for rows in (turned(key), value)]
        else:
            parts = [(key, key.norm(dim=-1), KEY_NORM), (value, value.abs().amax(dim=-1), LARGEST_VALUE)]
        n = 32 // self.bits
        for i, (rows, size, whole) in enumerate(parts):
            numbers, scales = self._parts(kv, i)
            by = torch.where((size >= SMALL) & size.isfinite(), whole / size, 0.0)
            found = (rows * by[..., None]).nan_to_num().round().to(kv.dtype)
            scales[plan.blocks, :, plan.offsets] = size / whole
            if i == 0:
                numbers[plan.blocks, :, :, plan.offsets] = found.reshape(*found.shape[:-1], -1, n)
            else:
                numbers[plan.blocks, :, plan.offsets // n, :, plan.offsets % n] = found

    def attend(
        self, query: Tensor, kv: Tensor, plan: Plan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal attention of `[num_tokens, num_heads, head_dim]`; same shape back."""
        if self.bits == 8:
            query = turned(query)
        return super().attend(query, kv, plan, scale=scale, window=window, softcap=softcap)

    def gather(self, kv: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Keys, turned where they are kept so, and values, each `[num_kv_heads, 1, seq_len, head_dim]` float32."""
        (keys, key_scales), (values, value_scales) = self._parts(kv, 0), self._parts(kv, 1)
        found = (
            keys[span.table].transpose(2, 3).flatten(3) * key_scales[span.table][..., None],
            values[span.table].transpose(3, 4).flatten(2, 3) * value_scales[span.table][..., None],
        )
        together = [x.transpose(0, 1).flatten(1, 2)[:, None, : span.seq_len] for x in found]
        return together[0], together[1]

    def _parts(self, kv: Tensor, which: int) -> tuple[Tensor, Tensor]:
        """Of a layer's keys (0) or values (1): views of the numbers and of the scales, `[num_blocks, num_kv_heads, …]`.

        Numbers are `[head_dim / n, block_size, n]` of keys, `[block_size / n, head_dim, n]` of values.
        """
        import torch

        n, block_size, head_dim = 32 // self.bits, kv.shape[-2], kv.shape[-1] - self.kv_extra
        flat = kv[:, which].flatten(-2)
        integers, scales = flat[..., : block_size * head_dim], flat[..., block_size * head_dim :].view(torch.float32)
        shape = (head_dim // n, block_size, n) if which == 0 else (block_size // n, head_dim, n)
        return integers.reshape(*integers.shape[:-1], *shape), scales


def turned(x: Tensor) -> Tensor:
    """*x* `[…, head_dim]`, each run of as many features as head_dim has factors of 2 times a Hadamard matrix.

    The matrix is orthonormal: a query and a key that were both turned have the product they had.
    """
    import torch

    run = x.shape[-1] & -x.shape[-1]
    found: Tensor = x * run**-0.5
    apart = 1
    while apart < run:
        a, b = found.reshape(*x.shape[:-1], -1, 2, apart).unbind(-2)
        found = torch.stack((a + b, a - b), -2).flatten(-3)
        apart *= 2
    return found


def _build(context: Context, options: Options) -> NativeAttention:
    return NativeAttention(context.kernels, bits=options.bits or _bits(context))


def _bits(context: Context) -> int:
    few = context.weight_bits is not None and context.weight_bits < 16
    return 8 if few and context.kernels in BYTES_DIALECTS else 16


def _auto(context: Context, options: None) -> Attention:
    program, attention = context.program, NativeAttention(context.kernels, bits=_bits(context))
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
    register("native", _build, config=Options, doc="The compiled kernels' cache, in integers of 16 or 8 bits.")
