"""The words in which a model family is written: a `Builder` writes a `Program`, and a Program is data.

A family reads the metadata of a `Checkpoint` and calls the Builder's operations in the order in which the model
computes. Every operation makes one value, a matrix `[num_tokens, width]`, whose width is checked as it is written.
The Program says what is computed, from which tensors of the checkpoint; it knows no device, no batch and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct

from .errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from .protocols import Artifact

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""`gelu` is the exact one, by the error function."""


class ShapeError(ModelError):
    """An operation was given values that do not fit together."""


class Checkpoint(Protocol):
    """An opened checkpoint: its metadata and its table of tensors. Weights are read one at a time.

    Attributes:
        architecture: the family's name in the checkpoint, such as `llama` (GGUF) or `LlamaForCausalLM` (Hugging Face).
        metadata: GGUF key/values, or `config.json`.
        shapes: tensor name → shape, outermost dimension first as torch has it.
        generation: `generation_config.json`; empty for GGUF.
    """

    artifact: Artifact
    architecture: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    generation: Mapping[str, Any]

    def tensor(self, name: str) -> Tensor:
        """The whole tensor in float32, dequantized, contiguous, in memory of its own.

        Raises:
            ModelError: there is none of that name, or its type cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of the files. Nothing may be read afterwards."""
        ...


class Source(Struct, frozen=True, kw_only=True):
    """Where a weight lies in a checkpoint, if it is not a whole tensor as it stands. Undone in the order of the fields.

    Attributes:
        tensor: the tensor's name in the checkpoint.
        stack: (index, how many), where matrices of one shape are stacked along a first dimension, as experts are.
        transposed: a matrix lies as `[in_features, out_features]`.
        rows: (start, how many in all), where the rows of several matrices are fused into one.
        plus: added to every element, as the norms of Gemma multiply with `1 + weight`.
    """

    tensor: str
    stack: tuple[int, int] | None = None
    transposed: bool = False
    rows: tuple[int, int] | None = None
    plus: float = 0.0


class Weight(Struct, frozen=True, kw_only=True):
    """A tensor that a Program needs.

    Attributes:
        shape: as the Program multiplies with it.
        source: the tensor's name in the checkpoint.
        permuted_heads: not 0 where the checkpoint interleaves the two halves of each of that many heads along the rows
            (rows 0, d/2, 1, d/2 + 1, …), as GGUF does with Q and K of llama; undone when it is loaded.
        stack, transposed, rows, plus: as in `Source`; undone before *permuted_heads*.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    permuted_heads: int = 0
    stack: tuple[int, int] | None = None
    transposed: bool = False
    rows: tuple[int, int] | None = None
    plus: float = 0.0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = self.shape if self.rows is None else (self.rows[1], *self.shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.stack is None else (self.stack[1], *shape)


class Value(Struct, frozen=True):
    """What operation *index* made: `[num_tokens, width]`, after `head` `[num_samples, width]`."""

    index: int
    width: int


class Operation(Struct, frozen=True, kw_only=True, tag=True):
    """One step of a Program. Integer fields named after an operand are indices of the operations that made it."""


class Embed(Operation, frozen=True, kw_only=True):
    """Row `token_ids` of the table *weight*."""

    weight: str


class Position(Operation, frozen=True, kw_only=True):
    """Row `positions` of the table *weight*, which is learned."""

    weight: str


class Norm(Operation, frozen=True, kw_only=True):
    """`x / sqrt(mean(x²) + eps) · weight`, over each run of as many features as *weight* has.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """

    x: int
    weight: str
    eps: float


class LayerNorm(Operation, frozen=True, kw_only=True):
    """`(x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) · weight + bias`, over all features.

    Source: Ba, Kiros and Hinton 2016, Layer Normalization, arXiv:1607.06450.
    """

    x: int
    weight: str
    bias: str
    eps: float


class Linear(Operation, frozen=True, kw_only=True):
    """`x · weightᵀ + bias`."""

    x: int
    weight: str
    bias: str | None


class Rotate(Operation, frozen=True, kw_only=True):
    """Turn features j and j + len(frequencies) of each head by the angle position · frequencies[j], in float32.

    Attributes:
        magnitude: what the turned features are multiplied with; those beyond the frequencies stay as they are.

    Source: Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.4.2, in the order of features that Hugging Face uses.
    """

    x: int
    head_dim: int
    frequencies: tuple[float, ...]
    magnitude: float = 1.0


class Attend(Operation, frozen=True, kw_only=True):
    """Causal attention of each token over its own sequence, through the KV cache of *layer*.

    Attributes:
        window: see only that many tokens, the own one included; None: all.
        softcap: squash scores to `softcap · tanh(score / softcap)`; None: not.
    """

    query: int
    key: int
    value: int
    layer: int
    scale: float
    window: int | None
    softcap: float | None


class Gated(Operation, frozen=True, kw_only=True):
    """`activation(gate) · up`, element by element."""

    gate: int
    up: int
    activation: Activation


class Activate(Operation, frozen=True, kw_only=True):
    """`activation(x)`, element by element."""

    x: int
    activation: Activation


class Add(Operation, frozen=True, kw_only=True):
    """`a + b`."""

    a: int
    b: int


class Scale(Operation, frozen=True, kw_only=True):
    """`x · factor`."""

    x: int
    factor: float


class Softcap(Operation, frozen=True, kw_only=True):
    """`cap · tanh(x / cap)`."""

    x: int
    cap: float


class Expert(Struct, frozen=True, kw_only=True):
    """The weights of one gated feed-forward layer."""

    gate: str
    up: str
    down: str


class Moe(Operation, frozen=True, kw_only=True):
    """The *num_selected* likeliest experts of each token, by softmax over *router*, summed with their probabilities.

    Attributes:
        renormalize: scale the chosen probabilities to a sum of 1.

    Source: Jiang et al. 2024, Mixtral of Experts, arXiv:2401.04088, section 2.1.
    """

    x: int
    router: str
    experts: tuple[Expert, ...]
    num_selected: int
    renormalize: bool
    activation: Activation


class Head(Operation, frozen=True, kw_only=True):
    """Logits of the sampled rows only: `x[sample_rows] · weightᵀ`, `[num_samples, vocab_size]`."""

    x: int
    weight: str


Op = (
    Embed
    | Position
    | Norm
    | LayerNorm
    | Linear
    | Rotate
    | Attend
    | Gated
    | Activate
    | Add
    | Scale
    | Softcap
    | Moe
    | Head
)


def operands(op: Op) -> list[int]:
    """The operations whose values *op* reads."""
    fields = ("x", "a", "b", "query", "key", "value", "gate", "up")
    return [x for field in fields if isinstance(x := getattr(op, field, None), int)]


class Program(Struct, frozen=True, kw_only=True):
    """A model, as data. Operation i makes value i; the last one makes the logits.

    Attributes:
        weights: canonical name → weight; a tied head names the embedding's.
        max_positions: tokens a sequence may have.
    """

    ops: tuple[Op, ...]
    weights: Mapping[str, Weight]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int

    @property
    def plain(self) -> list[str]:
        """Weights that are used as they are, in the order in which they are first used: tables and norms."""
        found: dict[str, None] = {}
        for op in self.ops:
            match op:
                case Embed() | Position() | Norm():
                    found[op.weight] = None
                case LayerNorm():
                    found |= {op.weight: None, op.bias: None}
        return list(found)

    @property
    def matrices(self) -> dict[str, str | None]:
        """Weights that a quantizer takes over, each with its bias, in the order in which they are first used."""
        found: dict[str, str | None] = {}
        for op in self.ops:
            match op:
                case Linear():
                    found[op.weight] = op.bias
                case Moe():
                    found[op.router] = None
                    found |= {name: None for expert in op.experts for name in (expert.gate, expert.up, expert.down)}
                case Head():
                    found[op.weight] = None
        return found


def rotary_frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    """Radians a position, one for each pair of features: `theta ** (-2j / head_dim)`.

    Raises:
        ShapeError: *head_dim* is odd.
    """
    if head_dim % 2:
        raise ShapeError(f"head_dim must be even to be rotated in pairs, got {head_dim}")
    return tuple(float(theta ** (-2 * j / head_dim)) for j in range(head_dim // 2))


class Builder:
    """Writes a Program, one operation a call, and checks that widths fit.

    Args:
        source: canonical name of a weight → name of the checkpoint's tensor, or its part in one.

    Raises:
        ShapeError: from any method, where values or sizes do not fit.
    """

    def __init__(
        self,
        *,
        source: Callable[[str], str | Source],
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        max_positions: int,
    ) -> None:
        self._sizes = {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab_size,
            "max_positions": max_positions,
        }
        for name, size in self._sizes.items():
            if size < 1:
                raise ShapeError(f"{name} must be at least 1, got {size}")
        if num_heads % num_kv_heads:
            raise ShapeError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self._source = source
        self._ops: list[Op] = []
        self._weights: dict[str, Weight] = {}
        self._next_layer = 0

    def embed(self, name: str = "embed") -> Value:
        """Start: one row of the table `[vocab_size, hidden_size]` a token."""
        shape = (self._sizes["vocab_size"], self._sizes["hidden_size"])
        return self._made(Embed(weight=self._weight(name, shape)), self._sizes["hidden_size"])

    def position(self, name: str = "position") -> Value:
        """One row of the table `[max_positions, hidden_size]` a token."""
        shape = (self._sizes["max_positions"], self._sizes["hidden_size"])
        return self._made(Position(weight=self._weight(name, shape)), self._sizes["hidden_size"])

    def norm(self, x: Value, name: str, *, eps: float, width: int | None = None) -> Value:
        """RMS norm over all features of *x*, or over each run of *width* of them (a head)."""
        width = x.width if width is None else width
        if width < 1 or x.width % width:
            raise ShapeError(f"norm {name}: a width of {x.width} has no runs of {width}")
        return self._made(Norm(x=x.index, weight=self._weight(name, (width,)), eps=eps), x.width)

    def layer_norm(self, x: Value, name: str, *, eps: float) -> Value:
        """Norm around the mean, with a bias `name.bias`."""
        weight, bias = self._weight(name, (x.width,)), self._weight(f"{name}.bias", (x.width,))
        return self._made(LayerNorm(x=x.index, weight=weight, bias=bias, eps=eps), x.width)

    def linear(self, x: Value, name: str, width: int, *, bias: bool = False, permuted_heads: int = 0) -> Value:
        """Multiply with `[width, x.width]`; *permuted_heads* as in `Weight`."""
        weight = self._weight(name, (width, x.width), permuted_heads)
        named = self._weight(f"{name}.bias", (width,), permuted_heads) if bias else None
        return self._made(Linear(x=x.index, weight=weight, bias=named), width)

    def rotate(self, x: Value, frequencies: tuple[float, ...], *, magnitude: float = 1.0) -> Value:
        """Turn the first `2 · len(frequencies)` features of each head by its position; *magnitude* multiplies them."""
        head_dim = self._sizes["head_dim"]
        if x.width % head_dim:
            raise ShapeError(f"rotate: a width of {x.width} is not a whole number of heads of {head_dim}")
        if not 1 <= len(frequencies) <= head_dim // 2:
            raise ShapeError(
                f"rotate: heads of {head_dim} have {head_dim // 2} pairs, got {len(frequencies)} frequencies"
            )
        op = Rotate(x=x.index, head_dim=head_dim, frequencies=frequencies, magnitude=magnitude)
        return self._made(op, x.width)

    def attend(
        self,
        query: Value,
        key: Value,
        value: Value,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """The next layer's attention; *scale* is `head_dim ** -0.5` unless given."""
        head_dim = self._sizes["head_dim"]
        query_width, kv_width = self._sizes["num_heads"] * head_dim, self._sizes["num_kv_heads"] * head_dim
        found = (query.width, key.width, value.width)
        if found != (query_width, kv_width, kv_width):
            raise ShapeError(
                f"attend: query, key and value must be {query_width}, {kv_width} and {kv_width} wide, got "
                f"{found[0]}, {found[1]} and {found[2]}"
            )
        op = Attend(
            query=query.index,
            key=key.index,
            value=value.index,
            layer=self._next_layer,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
        )
        self._next_layer += 1
        return self._made(op, query.width)

    def gated(self, gate: Value, up: Value, activation: Activation = "silu") -> Value:
        """`activation(gate) · up`."""
        self._same("gated", gate, up)
        return self._made(Gated(gate=gate.index, up=up.index, activation=activation), gate.width)

    def activate(self, x: Value, activation: Activation) -> Value:
        """`activation(x)`."""
        return self._made(Activate(x=x.index, activation=activation), x.width)

    def add(self, a: Value, b: Value) -> Value:
        """`a + b`."""
        self._same("add", a, b)
        return self._made(Add(a=a.index, b=b.index), a.width)

    def scale(self, x: Value, factor: float) -> Value:
        """`x · factor`."""
        return self._made(Scale(x=x.index, factor=factor), x.width)

    def softcap(self, x: Value, cap: float) -> Value:
        """`cap · tanh(x / cap)`."""
        if cap <= 0:
            raise ShapeError(f"softcap must be above 0, got {cap}")
        return self._made(Softcap(x=x.index, cap=cap), x.width)

    def moe(
        self,
        x: Value,
        name: str,
        width: int,
        *,
        num_experts: int,
        num_selected: int,
        renormalize: bool = True,
        activation: Activation = "silu",
    ) -> Value:
        """Experts of inner *width*; weights are `name.router` and `name.experts.N.gate`, `.up` and `.down`."""
        if not 1 <= num_selected <= num_experts:
            raise ShapeError(f"moe {name}: cannot select {num_selected} of {num_experts} experts")
        inner, outer = (width, x.width), (x.width, width)
        experts = tuple(
            Expert(
                gate=self._weight(f"{name}.experts.{i}.gate", inner),
                up=self._weight(f"{name}.experts.{i}.up", inner),
                down=self._weight(f"{name}.experts.{i}.down", outer),
            )
            for i in range(num_experts)
        )
        op = Moe(
            x=x.index,
            router=self._weight(f"{name}.router", (num_experts, x.width)),
            experts=experts,
            num_selected=num_selected,
            renormalize=renormalize,
            activation=activation,
        )
        return self._made(op, x.width)

    def head(self, x: Value, name: str = "head") -> Value:
        """Logits of the sampled rows; a tied head gives the embedding's name."""
        vocab_size = self._sizes["vocab_size"]
        return self._made(Head(x=x.index, weight=self._weight(name, (vocab_size, x.width))), vocab_size)

    def build(self) -> Program:
        """The Program; the operation written last makes its logits."""
        num_layers = self._sizes["num_layers"]
        if self._next_layer != num_layers:
            raise ShapeError(f"a Program of {num_layers} layers must attend {num_layers} times, got {self._next_layer}")
        if not any(isinstance(op, Head) for op in self._ops):
            raise ShapeError("a Program must end in logits; call head")
        return Program(ops=tuple(self._ops), weights=self._weights, **self._sizes)

    def _weight(self, name: str, shape: tuple[int, ...], permuted_heads: int = 0) -> str:
        if permuted_heads and shape[0] % (2 * permuted_heads):
            raise ShapeError(f"weight {name}: {shape[0]} rows are not {permuted_heads} heads of two halves")
        weight = _weight(name, shape, self._source(name), permuted_heads)
        known = self._weights.setdefault(name, weight)
        if known != weight:
            raise ShapeError(f"weight {name} is used as {list(known.shape)} and as {list(shape)}")
        return name

    def _same(self, what: str, a: Value, b: Value) -> None:
        if a.width != b.width:
            raise ShapeError(f"{what}: both sides must be equally wide, got {a.width} and {b.width}")

    def _made(self, op: Op, width: int) -> Value:
        self._ops.append(op)
        return Value(len(self._ops) - 1, width)


def _weight(name: str, shape: tuple[int, ...], source: str | Source, permuted_heads: int) -> Weight:
    """The Weight that *source* describes, checked against *shape*."""
    if isinstance(source, str):
        return Weight(name=name, shape=shape, source=source, permuted_heads=permuted_heads)
    if source.stack and not 0 <= source.stack[0] < source.stack[1]:
        raise ShapeError(f"weight {name}: there is no number {source.stack[0]} in a stack of {source.stack[1]}")
    if source.rows and not 0 <= source.rows[0] <= source.rows[1] - shape[0]:
        raise ShapeError(f"weight {name}: {shape[0]} rows from row {source.rows[0]} exceed the {source.rows[1]} fused")
    return Weight(
        name=name,
        shape=shape,
        source=source.tensor,
        permuted_heads=permuted_heads,
        stack=source.stack,
        transposed=source.transposed and len(shape) > 1,
        rows=source.rows,
        plus=source.plus,
    )
