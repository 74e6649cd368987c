"""From a model reference to a model that runs: find the checkpoint, check it against its Program, load the weights.

Receives the chosen parts (sources, architecture, quantizer, attention) and an opened checkpoint; knows no file format
and no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import msgspec
import torch
from torch import Tensor

from ...hooks.errors import ModelError
from ...hooks.program import Attend, Checkpoint, Embed, Program, Weight
from ...hooks.protocols import Architecture, Artifact, Attention, Linear, ModelSource, Quantizer
from ..kernels.native.model import NativeModel
from ..kernels.native.pack import Packed, dequantize
from ..kernels.quantized import Blocks
from ..kernels.reference import ReferenceModel
from ..kv.store import KVStore

STORED_BITS = {4: 5.0, 8: 8.5}
"""Of a weight in groups of 32, its share of scales included."""

Progress = Callable[[str, int, int], None]
"""Called with (what, bytes done, bytes in all)."""


def quiet(what: str, done_bytes: int, total_bytes: int) -> None:
    """The Progress of those who show none."""


def resolve(reference: str, sources: Mapping[str, ModelSource], progress: Progress = quiet) -> Artifact:
    """Find the checkpoint behind *reference*: `scheme:rest` for a scheme of *sources*, or a path.

    Raises:
        ModelError: an unknown scheme, or the source found nothing.
    """
    scheme, colon, rest = reference.partition(":")
    if colon and scheme in sources:
        return sources[scheme].resolve(rest, progress)
    # One letter is a drive, and a scheme has no separator in it.
    if colon and scheme.isalnum() and len(scheme) > 1:
        known = ", ".join(f"{name}:" for name in sorted(sources))
        raise ModelError(f"{reference}: unknown model source {scheme}:; there are {known}, and paths without a scheme")
    if "file" not in sources:
        raise ModelError(f"{reference}: a path needs the model source file:, which is not enabled")
    return sources["file"].resolve(reference, progress)


def weight_bytes(program: Program, checkpoint: Checkpoint | None = None, quantizer: Quantizer | None = None) -> int:
    """Bytes of all weights as *quantizer* keeps them, without one in float32; a tied head counts once."""
    bits_of: Callable[[str, str | None], float] = getattr(quantizer, "bits", lambda name, kind: 32)
    kind_of: Callable[[str], str | None] = getattr(checkpoint, "kind", lambda name: None)
    matrices = program.matrices.keys() | {op.weight for op in program.ops if isinstance(op, Embed)}
    total = 0.0
    for name, weight in program.weights.items():
        bits = bits_of(name, kind_of(weight.source)) if name in matrices else 32
        total += STORED_BITS.get(int(bits), bits) * prod(weight.shape) / 8
    return int(total)


def check(program: Program, checkpoint: Checkpoint) -> None:
    """Compare every weight of *program* with the checkpoint's table of tensors.

    Raises:
        ModelError: names the weights that are missing or of another shape.
    """
    wrong = []
    for weight in program.weights.values():
        found = checkpoint.shapes.get(weight.source)
        if found != weight.stored_shape:
            shown = "there is none" if found is None else f"found {list(found)}"
            wrong.append(f"{weight.source} must be {list(weight.stored_shape)}, {shown}")
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ModelError(f"{checkpoint.artifact.path}: {'; '.join(wrong[:4])}{more}")


def load(
    artifact: Artifact,
    checkpoint: Checkpoint,
    architecture: Architecture,
    quantizer: Quantizer,
    attention: Attention,
    *,
    num_blocks: int,
    block_size: int,
    device: str = "cpu",
    dialect: str | None = None,
    num_threads: int = 1,
    progress: Progress = quiet,
) -> ReferenceModel | NativeModel:
    """Build the model that *checkpoint* describes, with an empty KV cache of *num_blocks* blocks (block 0 included).

    Args:
        dialect: of the compiled kernels, as `core.kernels.native.dialect` gives it; None: the reference runs the model.
        num_threads: of the compiled kernels.

    Raises:
        ModelError: the checkpoint and its Program disagree, or the attention cannot run it.
    """
    program = architecture.program(checkpoint)
    check(program, checkpoint)
    _check_attention(artifact, program, attention, device)
    loader = _Weights(artifact, program, checkpoint, quantizer, device, progress)
    tensors, linears = loader.load(tables_too=dialect is not None)
    store = KVStore(
        num_blocks=num_blocks,
        num_layers=program.num_layers,
        num_kv_heads=program.num_kv_heads,
        block_size=block_size,
        head_dim=program.head_dim + getattr(attention, "kv_extra", 0),
        device=device,
        dtype=getattr(torch, getattr(attention, "kv_dtype", "float32")),
    )
    if dialect is None:
        return ReferenceModel(program, tensors, linears, store, attention)
    return NativeModel(program, tensors, linears, store, attention, num_threads=num_threads, dialect=dialect)


def _check_attention(artifact: Artifact, program: Program, attention: Attention, device: str) -> None:
    for window, softcap in {(op.window, op.softcap) for op in program.ops if isinstance(op, Attend)}:
        reason = attention.supports(
            head_dim=program.head_dim,
            num_heads=program.num_heads,
            num_kv_heads=program.num_kv_heads,
            window=window,
            softcap=softcap,
            device=device,
        )
        if reason is not None:
            raise ModelError(f"{artifact.name}: {type(attention).__name__} cannot run this model: {reason}")


class _Weights:
    """Reads weights one tensor of the file after the other."""

    def __init__(
        self,
        artifact: Artifact,
        program: Program,
        checkpoint: Checkpoint,
        quantizer: Quantizer,
        device: str,
        progress: Progress,
    ) -> None:
        self._artifact = artifact
        self._program = program
        self._checkpoint = checkpoint
        self._quantizer = quantizer
        self._device = device
        self._progress = progress
        self._done, self._total = 0, weight_bytes(program)
        self._last: dict[str, Tensor] = {}

    def load(self, *, tables_too: bool) -> tuple[dict[str, Tensor], dict[str, Linear]]:
        """The tensors used as they are, and what the quantizer made of the others.

        Args:
            tables_too: tables of embeddings may stay in the quantizer's hands; else they are tensors.
        """
        tensors: dict[str, Tensor] = {}
        linears: dict[str, Linear] = {}
        plain = self._program.plain
        tables = {op.weight for op in self._program.ops if isinstance(op, Embed)}
        matrices = _by_source(self._program)
        for name in tables - {name for name, _ in matrices}:
            linear = self._from_blocks(name, None) if tables_too else None
            if linear is not None:
                linears[name] = linear
        for name in plain:
            if name not in linears and not (name in tables and self._kept_as_blocks(name, matrices)):
                tensors[name] = self._read(name)
        for name, bias in matrices:
            added = self._read(bias) if bias else None
            linear = self._from_blocks(name, added)
            if linear is None:
                tensor = tensors[name] if name in tensors else _shared(self._read(name), tensors)
                linear = self._quantizer.linear(name, tensor, added)
            linears[name] = linear
            packed = getattr(linear, "packed", None)
            if tables_too and name in tables and isinstance(packed, Packed):
                tensors.pop(name, None)
            elif name in plain and name not in tensors:
                tensors[name] = dequantize(packed) if isinstance(packed, Packed) else self._read(name)
        return tensors, linears

    def _kept_as_blocks(self, name: str, matrices: list[tuple[str, str | None]]) -> bool:
        """Whether a table that is the head too will come out of its blocks."""
        kind = getattr(self._checkpoint, "kind", None)
        known = kind is not None and kind(self._program.weights[name].source) in ("Q4_0", "Q4_1", "Q8_0")
        return known and any(matrix == name for matrix, _ in matrices) and hasattr(self._quantizer, "blocks")

    def _from_blocks(self, name: str, bias: Tensor | None) -> Linear | None:
        """What the quantizer makes of the file's own blocks; None where it wants floats or the file has none."""
        weight = self._program.weights[name]
        take, blocks_of = getattr(self._quantizer, "blocks", None), getattr(self._checkpoint, "blocks", None)
        if take is None or blocks_of is None or weight.transposed or weight.plus or len(weight.shape) != 2:
            return None
        kind = self._checkpoint.kind(weight.source)  # type: ignore[attr-defined]
        if kind not in ("Q4_0", "Q4_1", "Q8_0"):
            floats = None if kind in ("F32", "F16", "BF16", "F64") else self._read(name)
            if floats is None:
                return None
            linear: Linear | None = take(name, Blocks(kind=kind, raw=torch.empty(0)), floats, bias)
            return linear
        blocks = blocks_of(weight.source)
        raw = _arrange(blocks.raw, msgspec.structs.replace(weight, shape=(weight.shape[0], blocks.raw.shape[-1])))
        self._advance(prod(weight.shape))
        made: Linear | None = take(name, Blocks(kind=kind, raw=raw), None, bias)
        return made

    def _whole(self, weight: Weight) -> Tensor:
        """The tensor of the file. One with several matrices in it is kept until another is read."""
        if weight.shape == weight.stored_shape or len(weight.shape) == 1:
            return self._checkpoint.tensor(weight.source)
        if weight.source not in self._last:
            self._last.clear()
            self._last[weight.source] = self._checkpoint.tensor(weight.source)
        return self._last[weight.source]

    def _read(self, name: str) -> Tensor:
        weight = self._program.weights[name]
        tensor = _arrange(self._whole(weight), weight).to(self._device)
        self._advance(tensor.numel())
        return tensor

    def _advance(self, num_weights: int) -> None:
        self._done += 4 * num_weights
        self._progress(self._artifact.name, self._done, self._total)


def _by_source(program: Program) -> list[tuple[str, str | None]]:
    """`Program.matrices`, those that lie in one tensor of the file together, so that it is read once."""
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for name, bias in program.matrices.items():
        groups.setdefault(program.weights[name].source, []).append((name, bias))
    return [pair for group in groups.values() for pair in group]


def _shared(tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """One of *tensors* where it equals *tensor*: some files repeat the embedding as head."""
    return next((known for known in tensors.values() if known.shape == tensor.shape and known.equal(tensor)), tensor)


def _arrange(tensor: Tensor, weight: Weight) -> Tensor:
    """What *weight* is of the file's tensor.

    The rows of permuted heads are put in the order in which the Program rotates them: first halves, then second halves.
    """
    if weight.stack is not None:
        tensor = tensor[weight.stack[0]]
    if weight.transposed:
        tensor = tensor.T
    if weight.rows is not None:
        tensor = tensor[weight.rows[0] : weight.rows[0] + weight.shape[0]]
    if weight.permuted_heads:
        pairs = tensor.reshape(weight.permuted_heads, -1, 2, *tensor.shape[1:])
        tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    if weight.plus:
        tensor = tensor + weight.plus
    return tensor.contiguous()
