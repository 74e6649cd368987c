"""Which arithmetic keeps the model's answers: candidates simulated in torch against float32, before a kernel exists.

Weights are what the checkpoint's blocks say, in float32. A candidate rounds what a kernel would round: the rows that go
into a product, the head's weight, keys and values as they are written. Products themselves stay in float32, for sums
of integers are exact and their scales are float32 in the kernel too.

Run as `python -m benchmarks.quality.simulate`; it writes JSON and prints the table of docs/quantization.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional as F

from headrace.core.kernels.reference import ReferenceModel
from headrace.core.model.load import load
from headrace.core.opened import Opened
from headrace.hooks.program import Embed, Head
from headrace.hooks.protocols import Linear
from headrace.plugins.native_attention import turned
from headrace.plugins.sdpa import Plan, Sdpa
from headrace.plugins.unquantized import Unquantized

from . import contexts as c
from .divergence import Divergence, Summary
from .kl import REFERENCE, arguments, read_texts
from .report import RESULTS, table, write

BLOCK_SIZE = 16
Round = Callable[[Tensor], Tensor]


def as_is(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def through(dtype: torch.dtype) -> Round:
    """Rounds to *dtype* and back to float32."""
    return lambda x: x.to(dtype).float()


def grouped(group: int | None, bits: int = 8) -> Round:
    """Symmetric integers of *bits* bits, a float32 scale for each *group* values of a row; None: for the row."""
    most = 2 ** (bits - 1) - 1

    def round_(x: Tensor) -> Tensor:
        groups = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
        scale = groups.abs().amax(-1, keepdim=True) / most
        # A group of zeros has no scale; any will do.
        rounded: Tensor = (groups / scale.where(scale > 0, 1)).round() * scale
        return rounded.reshape(x.shape)

    return round_


class Candidate(Struct, frozen=True, kw_only=True):
    """What is rounded, and how.

    Attributes:
        activations: the rows that go into every product, the head's included.
        into: instead of *activations* for some products, by the last part of the weight's name, or `head`.
        keys_values: keys and values, on their way into the cache.
        queries: on their way to the keys.
        turns: keys and queries are multiplied with a Hadamard matrix before they are rounded.
        head: the head's weight, once.
        rows: rows of the embedding.
    """

    name: str
    activations: Round = as_is
    into: Mapping[str, Round] = {}
    keys_values: Round = as_is
    queries: Round = as_is
    turns: bool = False
    head: Round = as_is
    rows: Round = as_is


BY_16, BY_32, BY_ROW = grouped(16), grouped(32), grouped(None)
FINER = dict.fromkeys(("q", "k", "v", "head"), BY_16)
BF16, FP16 = through(torch.bfloat16), through(torch.float16)
HEAD_6 = grouped(32, bits=6)
CANDIDATES = (
    Candidate(name="activations: one scale a token", activations=BY_ROW),
    Candidate(name="activations: groups of 64", activations=grouped(64)),
    Candidate(
        name="activations: groups of 64, of 32 into down and o",
        activations=grouped(64),
        into={"down": BY_32, "o": BY_32},
    ),
    Candidate(name="activations: groups of 32", activations=BY_32),
    Candidate(name="activations: groups of 32, of 16 into q, k, v and the head", activations=BY_32, into=FINER),
    Candidate(name="KV: bfloat16", keys_values=BF16),
    Candidate(name="KV: float16", keys_values=FP16),
    Candidate(name="KV: int8, one scale a token and head", keys_values=BY_ROW),
    Candidate(name="KV: int8, groups of 32", keys_values=BY_32),
    Candidate(name="KV and queries: int8, one scale a token and head", keys_values=BY_ROW, queries=BY_ROW),
    Candidate(
        name="KV and queries: int8, one scale a token and head, keys turned",
        keys_values=BY_ROW,
        queries=BY_ROW,
        turns=True,
    ),
    Candidate(name="head: int8 activations in groups of 32", into={"head": BY_32}),
    Candidate(name="head: 6 bits in groups of 32", head=HEAD_6),
    Candidate(name="embedding rows: float16", rows=FP16),
    Candidate(name="activations by 32, KV bfloat16", activations=BY_32, keys_values=BF16),
    Candidate(name="activations by 32, KV float16", activations=BY_32, keys_values=FP16),
    Candidate(name="activations by 32, KV int8 by 32", activations=BY_32, keys_values=BY_32),
    Candidate(
        name="activations by 32, KV and queries int8, keys turned",
        activations=BY_32,
        keys_values=BY_ROW,
        queries=BY_ROW,
        turns=True,
    ),
    Candidate(
        name="activations by 32, by 16 into q, k, v and the head, KV and queries int8, keys turned",
        activations=BY_32,
        into=FINER,
        keys_values=BY_ROW,
        queries=BY_ROW,
        turns=True,
    ),
    Candidate(name="activations by 32, KV float16, head 6 bits", activations=BY_32, keys_values=FP16, head=HEAD_6),
    Candidate(name="activations by 32, KV float16, rows float16", activations=BY_32, keys_values=FP16, rows=FP16),
)


class Kept(Unquantized):
    """The quantizer `none`, which remembers what it was given."""

    def __init__(self) -> None:
        self.weights: dict[str, tuple[Tensor, Tensor | None]] = {}

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """`x · weightᵀ + bias`."""
        self.weights[name] = weight, bias
        return super().linear(name, weight, bias)


class Rounding(Sdpa):
    """The reference attention over a cache that rounds what is written to it, with rounded queries."""

    def __init__(self, candidate: Candidate) -> None:
        self._keys_values, self._queries = candidate.keys_values, candidate.queries
        self._turn = turned if candidate.turns else as_is

    def write(self, kv: Tensor, key: Tensor, value: Tensor, plan: Plan) -> None:
        """Store rounded keys and values."""
        super().write(kv, self._keys_values(self._turn(key)), self._keys_values(value), plan)

    def attend(
        self, query: Tensor, kv: Tensor, plan: Plan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal attention of rounded queries."""
        query = self._queries(self._turn(query))
        return super().attend(query, kv, plan, scale=scale, window=window, softcap=softcap)


class Simulator:
    """The reference and the candidates over one set of weights."""

    def __init__(self, found: Opened) -> None:
        kept = Kept()
        artifact, checkpoint = found.checkpoint.artifact, found.checkpoint
        reference = load(
            artifact,
            checkpoint,
            found.architecture,
            kept,
            Sdpa(),
            num_blocks=c.num_blocks(BLOCK_SIZE),
            block_size=BLOCK_SIZE,
        )
        # A float32 model that was not asked to be compiled is the interpreter's.
        assert isinstance(reference, ReferenceModel)
        self.reference, self.weights = reference, kept.weights

    def model(self, candidate: Candidate) -> ReferenceModel:
        """A model that computes as *candidate* says. Its KV cache is the reference's: one of them runs at a time."""
        program = self.reference.program
        rows = {op.weight for op in program.ops if isinstance(op, Embed)}
        heads = {op.weight for op in program.ops if isinstance(op, Head)}
        tensors = {n: candidate.rows(t) if n in rows else t for n, t in self.reference.tensors.items()}
        linears = {name: self._linear(name, candidate, name in heads) for name in self.weights}
        return ReferenceModel(program, tensors, linears, self.reference.store, Rounding(candidate))

    def _linear(self, name: str, candidate: Candidate, is_head: bool) -> Linear:
        weight, bias = self.weights[name]
        weight = candidate.head(weight) if is_head else weight
        round_ = candidate.into.get("head" if is_head else name.rpartition(".")[2], candidate.activations)
        return lambda x: F.linear(round_(x), weight, bias)


def simulate(
    simulator: Simulator, candidates: Sequence[Candidate], texts: Mapping[str, list[list[int]]]
) -> dict[str, dict[str, Summary]]:
    """Every candidate against the reference, over the contexts of every text; the reference runs once a context."""
    models = {candidate.name: simulator.model(candidate) for candidate in candidates}
    found: dict[str, dict[str, Summary]] = {name: {} for name in models}
    for text, whole in texts.items():
        divergences = {name: Divergence() for name in models}
        for token_ids in whole:
            reference = c.logits(simulator.reference, token_ids, BLOCK_SIZE)
            for name, model in models.items():
                divergences[name].add(reference, c.logits(model, token_ids, BLOCK_SIZE))
        for name, divergence in divergences.items():
            found[name][text] = divergence.summary()
        print(f"{text}: {len(whole)} contexts", flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = arguments("Candidate arithmetics, simulated in torch, against float32.")
    parser.add_argument("--only", default="", metavar="WORDS", help="candidates that have WORDS in their name")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    texts = read_texts(given.text or c.NAMES, given.contexts, *REFERENCE)
    with c.opened(c.settings(*REFERENCE)) as found:
        simulator = Simulator(found)
    chosen = [candidate for candidate in CANDIDATES if given.only in candidate.name]
    results = simulate(simulator, chosen, texts)
    write(given.out or RESULTS / "quality-simulated.json", results)
    print(table(results))


if __name__ == "__main__":
    main()
