"""How weight matrices lie in memory for the compiled kernels, and how they get there.

Always blocks of 16 outputs that hold all of K, so that outputs are the lanes of a vector; see `HrStorage` in
`src/abi.h`. Packing moves numbers and changes none: what `dequantize` gives is what was packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from .abi import Storage

LANES = 16
GROUP = 32


class Packed(Struct, frozen=True, kw_only=True):
    """A packed matrix of *n* outputs and *k* inputs.

    Attributes:
        data: `[num_blocks, bytes]` uint8 for `Q4` and `Q8`, `[num_blocks, k, 16]` else.
        bias: `[n]` float32.
    """

    storage: Storage
    n: int
    k: int
    data: Tensor
    bias: Tensor | None = None

    @property
    def integers(self) -> bool:
        """Whether it is multiplied with integers."""
        return self.storage in (Storage.Q4, Storage.Q8)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def pack_floats(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """Pack `[n, k]` float32, bfloat16 or float16."""
    storage = {torch.float32: Storage.F32, torch.bfloat16: Storage.BF16, torch.float16: Storage.F16}[weight.dtype]
    n, k = weight.shape
    data = _lanes(weight).transpose(1, 2).contiguous()
    return Packed(storage=storage, n=n, k=k, data=data, bias=bias)


def pack_q4(nibbles: Tensor, scales: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Packed:
    """Pack 4-bit groups: value = scale · nibble + offset.

    Args:
        nibbles: `[n, groups, 16]` uint8; byte b has value b of the group in its low half, 16 + b in its high one.
        scales, offsets: `[n, groups]` float16.
    """
    n, groups, _ = nibbles.shape
    quads = _lanes(nibbles).view(-1, LANES, groups, 4, 4).permute(0, 2, 3, 1, 4).reshape(-1, groups, 256)
    data = torch.cat((quads, _halves(scales), _halves(offsets)), -1).flatten(1)
    return Packed(storage=Storage.Q4, n=n, k=groups * GROUP, data=data, bias=bias)


def pack_q8(values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Packed:
    """Pack 8-bit groups: value = scale · integer.

    Args:
        values: `[n, groups, 32]` int8, or uint8 with the same bits.
        scales: `[n, groups]` float16.
    """
    n, groups, _ = values.shape
    raised = values.view(torch.uint8) ^ 128
    quads = _lanes(raised).view(-1, LANES, groups, 8, 4).permute(0, 2, 3, 1, 4).reshape(-1, groups, 512)
    halves = _halves(scales)
    if groups % 2:
        quads, halves = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (quads, halves))
    data = torch.cat((halves.reshape(len(quads), -1, 64), quads.reshape(len(quads), -1, 1024)), -1).flatten(1)
    return Packed(storage=Storage.Q8, n=n, k=groups * GROUP, data=data, bias=bias)


def stack(parts: Sequence[Packed]) -> Packed:
    """One matrix with the outputs of all *parts*, which are of one storage and a multiple of 16 wide."""
    biases = None
    if any(part.bias is not None for part in parts):
        biases = torch.cat([torch.zeros(part.n) if part.bias is None else part.bias for part in parts])
    return Packed(
        storage=parts[0].storage,
        n=sum(part.n for part in parts),
        k=parts[0].k,
        data=torch.cat([part.data for part in parts]),
        bias=biases,
    )


def interleave(gate: Packed, up: Packed) -> Packed:
    """Two blocks of gates, then the two of their ups, and so on; both a multiple of 32 wide and without bias."""
    pairs = [part.data.view(-1, 2, *part.data.shape[1:]) for part in (gate, up)]
    data = torch.stack(pairs, 1).reshape(-1, *gate.data.shape[1:])
    return Packed(storage=gate.storage, n=2 * gate.n, k=gate.k, data=data)


def dequantize(packed: Packed) -> Tensor:
    """`[n, k]` float32."""
    if not packed.integers:
        return packed.data.float().transpose(1, 2).reshape(-1, packed.k)[: packed.n].contiguous()
    values, scales, offsets = _groups(packed)
    weights = (values.float() * scales + offsets).reshape(len(values) * LANES, -1)
    return weights[: packed.n].contiguous()


def _groups(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers `[num_blocks, 16, groups, 32]` uint8, scales and offsets `[num_blocks, 16, groups, 1]` float32."""
    blocks, groups = len(packed.data), packed.k // GROUP
    if four := packed.storage is Storage.Q4:
        whole = packed.data.view(blocks, groups, -1)
        quads, rest = whole[..., :256], whole[..., 256:]
    else:
        pairs = packed.data.view(blocks, -1, 1088)
        rest, quads = (
            part.reshape(blocks, -1, part.shape[-1] // 2)[:, :groups] for part in (pairs[..., :64], pairs[..., 64:])
        )
    numbers = rest.contiguous().view(torch.float16).float()
    values = quads.reshape(blocks, groups, -1, LANES, 4).permute(0, 3, 1, 2, 4).reshape(blocks, LANES, groups, -1)
    if four:
        values = torch.cat((values & 15, values >> 4), -1)
    scales = numbers[..., :LANES]
    offsets = numbers[..., LANES:] if four else scales * -128
    return values, scales.transpose(1, 2)[..., None], offsets.transpose(1, 2)[..., None]


def _lanes(x: Tensor) -> Tensor:
    """`[n, …]` → `[num_blocks, 16, …]`, zeros at the end."""
    missing = -len(x) % LANES
    if missing:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    return x.view(-1, LANES, *x.shape[1:])


def _halves(numbers: Tensor) -> Tensor:
    """`[n, groups]` float16 → `[num_blocks, groups, 32]` bytes."""
    return _lanes(numbers).transpose(1, 2).contiguous().view(torch.uint8)
