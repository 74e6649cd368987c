"""Quantizers `int8`, `int4` and `auto`: weight matrices in groups of 32, multiplied with integers.

Blocks of a GGUF of type Q4_0, Q4_1 and Q8_0 stay as they are, but that `int4` makes 4 bits of 8. The head and what is
tied to it keep 8 bits: a rounding there goes straight into the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from ..hooks.protocols import Context, Linear, Quantizer, Register
from ..hooks.registry import plugin
from .unquantized import Unquantized

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.kernels.quantized import Blocks

headrace_api = 1

FOUR_BITS = frozenset(
    [
        "Q4_0",
        "Q4_1",
        "Q4_K",
        "IQ4_NL",
        "IQ4_XS",
        "Q3_K",
        "Q2_K",
        "IQ3_S",
        "IQ3_XXS",
        "IQ2_S",
        "IQ2_XS",
        "IQ2_XXS",
        "IQ1_S",
        "IQ1_M",
        "TQ1_0",
        "TQ2_0",
    ]
)
EIGHT_BITS = frozenset(["Q8_0", "Q8_1", "Q8_K", "Q6_K", "Q5_0", "Q5_1", "Q5_K"])


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    head_bits: 8, or 4 where the head may lose quality too.
    """

    head_bits: int = 8


class Integers:
    """Keeps matrices in integers.

    Args:
        bits: of what comes as floats, 4 or 8; None: what comes as floats stays so.
        head_bits: the same for the matrices `head` and `embed`.
    """

    def __init__(self, bits: int | None, head_bits: int | None) -> None:
        self._bits = bits
        self._head_bits = head_bits

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """Take over `[out_features, in_features]` float32."""
        return self._made(weight, bias, self.bits(name, None))

    def blocks(self, name: str, blocks: Blocks, floats: Tensor | None, bias: Tensor | None) -> Linear | None:
        """Take over a checkpoint's own blocks; None: only floats will do."""
        from ..core.kernels.quantized import QuantizedLinear, from_blocks

        bits = self.bits(name, blocks.kind)
        kept = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}.get(blocks.kind)
        if kept is None or kept > bits:
            return None if floats is None else self._made(floats, bias, bits)
        packed = from_blocks(blocks, bias)
        return None if packed is None else QuantizedLinear(packed)

    def bits(self, name: str, kind: str | None) -> int:
        """Bits of a matrix that the checkpoint has as *kind* (None: as floats)."""
        head = name in ("head", "embed")
        asked = self._head_bits if head else self._bits
        if kind in FOUR_BITS:
            return 4 if not head or asked == 4 or kind in ("Q4_0", "Q4_1") else 8
        if kind in EIGHT_BITS:
            return min(8, asked or 8)
        return asked or 32

    def _made(self, weight: Tensor, bias: Tensor | None, bits: int) -> Linear:
        from ..core.kernels.quantized import QuantizedLinear, fits, quantize_q4, quantize_q8

        if bits == 32 or not fits(weight):
            return Unquantized().linear("", weight, bias)
        return QuantizedLinear((quantize_q4 if bits == 4 else quantize_q8)(weight, bias))


def _int8(context: Context, options: None) -> Integers:
    return Integers(8, 8)


def _int4(context: Context, options: Options) -> Integers:
    return Integers(4, options.head_bits)


def _auto(context: Context, options: None) -> Quantizer:
    """Without compiled kernels, integers are slower than floats and no better."""
    return Unquantized() if context.kernels is None else Integers(None, None)


@plugin
def register_quantizer(register: Register) -> None:
    """Offer `auto`, `int8` and `int4`."""
    register(
        "auto", _auto, doc="A quantized checkpoint's own 4 or 8 bits where there are compiled kernels, else floats."
    )
    register("int8", _int8, doc="8 bits in groups of 32; 4-bit blocks of a checkpoint stay.")
    register("int4", _int4, config=Options, doc="4 bits in groups of 32, the head in 8.")
