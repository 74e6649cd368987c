"""From a model reference to a model that runs: find the checkpoint, check it against its Program, load the weights.

Receives the chosen parts (sources, architecture, quantizer, attention) and an opened checkpoint; knows no file format
and no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from torch import Tensor

from ...hooks.errors import ModelError
from ...hooks.program import Attend, Checkpoint, Program, Weight
from ...hooks.protocols import Architecture, Artifact, Attention, Linear, ModelSource, Quantizer
from ..kernels.reference import ReferenceModel
from ..kv.store import KVStore

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


def weight_bytes(program: Program) -> int:
    """Bytes of all weights in float32, as the quantizer `none` keeps them; a tied head counts once."""
    return sum(4 * prod(weight.shape) for weight in program.weights.values())


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
    progress: Progress = quiet,
) -> ReferenceModel:
    """Build the model that *checkpoint* describes, with an empty KV cache of *num_blocks* blocks (block 0 included).

    Raises:
        ModelError: the checkpoint and its Program disagree, or the attention cannot run it.
    """
    program = architecture.program(checkpoint)
    check(program, checkpoint)
    _check_attention(artifact, program, attention, device)
    tensors, linears = _load_weights(artifact, program, checkpoint, quantizer, device, progress)
    store = KVStore(
        num_blocks=num_blocks,
        num_layers=program.num_layers,
        num_kv_heads=program.num_kv_heads,
        block_size=block_size,
        head_dim=program.head_dim,
        device=device,
    )
    return ReferenceModel(program, tensors, linears, store, attention)


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


def _load_weights(
    artifact: Artifact,
    program: Program,
    checkpoint: Checkpoint,
    quantizer: Quantizer,
    device: str,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, Linear]]:
    """The tensors used as they are, and what the quantizer made of the others. Reads one tensor after the other."""
    plain = program.plain
    tensors: dict[str, Tensor] = {}
    linears: dict[str, Linear] = {}
    done, total = 0, weight_bytes(program)
    last: dict[str, Tensor] = {}

    def whole(weight: Weight) -> Tensor:
        """The tensor of the file. One with several matrices in it is kept until another is read."""
        if weight.shape == weight.stored_shape or len(weight.shape) == 1:
            return checkpoint.tensor(weight.source)
        if weight.source not in last:
            last.clear()
            last[weight.source] = checkpoint.tensor(weight.source)
        return last[weight.source]

    def read(name: str) -> Tensor:
        nonlocal done
        weight = program.weights[name]
        tensor = _arrange(whole(weight), weight).to(device)
        done += 4 * tensor.numel()
        progress(artifact.name, done, total)
        return tensor

    for name in plain:
        tensors[name] = read(name)
    for name, bias in _by_source(program):
        added = read(bias) if bias else None
        tensor = tensors[name] if name in tensors else _shared(read(name), tensors)
        linears[name] = quantizer.linear(name, tensor, added)
    return tensors, linears


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
