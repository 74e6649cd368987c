"""Weight matrices in groups of 32: how they are made from floats or from a checkpoint's own blocks, and multiplied.

One arithmetic, whoever runs it: activations become integers -127 … 127 in groups of 32 with one float scale each, a
group's products are summed exactly, and the scales are applied in ascending groups. The compiled kernels do just that
on packed weights; `QuantizedLinear` says the same in torch, for where there are none. Beside a KV cache of 8 bits the
kernels give halves of a group scales of their own, on the way to keys, values and logits.
"""

from __future__ import annotations

from typing import Final

import torch
from msgspec import Struct
from torch import Tensor

from .native.abi import SMALL
from .native.pack import GROUP, Packed, dequantize, pack_q4, pack_q8

SHRINK: Final = (1.0, 0.95, 0.9)
"""A range that leaves out the outermost values may serve the others better; each group takes the best of these."""


class Blocks(Struct, frozen=True, kw_only=True):
    """A matrix as its checkpoint has it.

    Attributes:
        kind: ggml's name of the type, such as `Q4_1`.
        raw: `[…, rows, bytes]` uint8.
    """

    kind: str
    raw: Tensor


class QuantizedLinear:
    """A matrix in integers. Implements `hooks.protocols.Linear`.

    Attributes:
        packed: for the compiled kernels, which multiply without calling this object.
    """

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        """`x · weightᵀ + bias` with *x* rounded to integers in groups of 32."""
        return torch.nn.functional.linear(round_activations(x), dequantize(self.packed), self.packed.bias)


def round_activations(x: Tensor, group: int = GROUP) -> Tensor:
    """*x* `[rows, k]` as its integers say it: in groups of so many, -127 … 127 times a scale."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    top = groups.abs().amax(-1, keepdim=True)
    integers = torch.round(groups * torch.where(top >= SMALL, 127 / top, 0))
    rounded: Tensor = (integers * (top / 127)).flatten(-2)
    return rounded


def fits(weight: Tensor) -> bool:
    """Whether the rows of `[n, k]` are whole groups."""
    return weight.shape[1] % GROUP == 0


def quantize_q4(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """`[n, k]` float32 in 4 bits: of each group of 32 a scale and an offset in float16, and 32 numbers 0 … 15.

    The range of a group is shrunk where that lowers its squared error.
    """
    groups = weight.reshape(len(weight), weight.shape[1] // GROUP, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for part in SHRINK:
        middle, half = (low + high) / 2, (high - low) / 2 * part
        offset = (middle - half).half()
        scale = (half * 2 / 15).half()
        step = scale.float()
        numbers = torch.where(step > 0, (groups - offset.float()) / step, 0).round_().clamp_(0, 15)
        error = (numbers * step + offset.float() - groups).square().sum(-1, keepdim=True)
        if best is None:
            best = error, numbers, scale, offset
            continue
        better = error < best[0]
        best = tuple(
            torch.where(better, new, old) for new, old in zip((error, numbers, scale, offset), best, strict=True)
        )  # type: ignore[assignment]
    assert best is not None
    _, numbers, scale, offset = best
    integers = numbers.to(torch.uint8)
    return pack_q4(integers[..., :16] | integers[..., 16:] << 4, scale[..., 0], offset[..., 0], bias)


def quantize_q8(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """`[n, k]` float32 in 8 bits: of each group of 32 a scale in float16, and 32 numbers -127 … 127."""
    groups = weight.reshape(len(weight), weight.shape[1] // GROUP, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    step = scale.float()
    numbers = torch.where(step > 0, groups / step, 0).round_().clamp_(-127, 127)
    return pack_q8(numbers.to(torch.int8), scale[..., 0], bias)


def from_blocks(blocks: Blocks, bias: Tensor | None = None) -> Packed | None:
    """Blocks of `Q4_0`, `Q4_1` and `Q8_0` as they are; None for other types. *blocks* is a matrix `[rows, bytes]`."""
    match blocks.kind:
        case "Q4_0":
            groups = blocks.raw.reshape(len(blocks.raw), -1, 18)
            scale = _halves(groups[..., :2])
            return pack_q4(groups[..., 2:], scale, scale * -8, bias)
        case "Q4_1":
            groups = blocks.raw.reshape(len(blocks.raw), -1, 20)
            return pack_q4(groups[..., 4:], _halves(groups[..., :2]), _halves(groups[..., 2:4]), bias)
        case "Q8_0":
            groups = blocks.raw.reshape(len(blocks.raw), -1, 34)
            return pack_q8(groups[..., 2:], _halves(groups[..., :2]), bias)
        case _:
            return None


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)[..., 0]
