"""Runs a lowered Program: one call of the library for each segment of a step, torch between segments.

Owns the buffers, which grow to the largest step there was and stay. Compute thread only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from ....hooks import program as p
from ....hooks.protocols import Attention, Linear
from ...kv.store import KVStore
from .. import Batch, Flat, as_arrays, as_tensors
from ..reference import ReferenceModel
from . import abi
from .draw import Drawer
from .lower import NOWHERE, Lowered, Space, lower
from .pack import Packed, pack_floats
from .pages import gather

TOKENS_AHEAD: Final = 2048
"""Whose memory is made ready before they come: a long prompt, and those beside it."""
TOKENS_AT_START: Final = 8192
BYTES_AT_START: Final = 256 << 20
"""Memory of the KV cache that is made ready before the first request: so many tokens, if that is not more than this."""
SPIN: Final = 4000
"""Looks at the counter, some 30 ns each, before an idle thread sleeps."""
MORE_ROWS: Final = 64
"""Buffers grow by whole multiples of this."""


class NativeModel:
    """Runs a Program. Implements `core.kernels.Model`.

    Args:
        tensors: weights that are used as they are, those of `Program.plain`.
        linears: what the quantizer made of each of `Program.matrices`; those that have `packed` or a float
            `weight` are the library's, and all are taken out of the dictionary.
        attention: `native`, whose KV cache the library has; any other is called for its layers.
        num_threads: the caller's included.
        dialect: of instructions, as `abi.dialect` gives it.
    """

    def __init__(
        self,
        program: p.Program,
        tensors: Mapping[str, Tensor],
        linears: dict[str, Linear],
        store: KVStore,
        attention: Attention,
        *,
        num_threads: int,
        dialect: str,
    ) -> None:
        self.program = program
        self.vocab_size = program.vocab_size
        self.store = store
        self.dialect = dialect
        experts = _expert_names(program)
        packed, foreign = {}, {name: linears[name] for name in experts}
        for name in [name for name in linears if name not in foreign]:
            linear = linears.pop(name)  # Else a float matrix would stay beside its packed copy.
            if (found := packed_of(linear)) is None:
                foreign[name] = linear
            else:
                packed[name] = found
        native_cache = getattr(attention, "native", False)
        # What 8 bits of keys and values cost in faithfulness, finer rows before them and before the head give back.
        fine = native_cache and dialect != "amx" and store.pool.dtype is torch.int8
        self._plain = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in packed}
        self.lowered = lower(program, self._plain, packed, attention=native_cache, fine=fine)
        self._between = ReferenceModel(program, self._plain, foreign, store, attention)
        self._floats = _Memory(self.lowered.buffers)
        self._ints = _IntMemory(self.lowered.ints, value_bytes=2 if dialect == "amx" else 1)
        self._turns = _Turns(self.lowered.turns)
        self._cache = _cache(store, program, native_cache)
        gather(self.lowered.matrices)
        self._ahead = store.ahead(TOKENS_AHEAD) if native_cache else None
        self._ops = (abi.Op * len(self.lowered.ops))(*self.lowered.ops)
        self._matrices = _matrices(self.lowered)
        self._c_program = self._describe()
        self._lib = abi.library()
        assert self._lib is not None
        self._engine = self._lib.hr_create(ctypes.byref(self._c_program), dialect.encode(), num_threads, SPIN)
        self._give_way = abi.give_way()
        self._rows = {abi.Domain.TOKENS: 0, abi.Domain.SAMPLES: 0}
        self._logits: Tensor | None = None

    def __del__(self) -> None:
        if ahead := getattr(self, "_ahead", None):
            ahead.close()
        if engine := getattr(self, "_engine", None):
            self._lib.hr_destroy(engine)  # type: ignore[union-attr]

    @property
    def drawer(self) -> Drawer:
        """Draws tokens on the model's threads."""
        return Drawer(self._engine)

    def make_ready(self) -> Callable[[], int] | None:
        """Have memory for the first tokens of the KV cache at hand.

        To be called when loading is over and what it took is free again.

        Returns:
            The first block whose memory is not at hand, at any time; None where nobody knows.
        """
        ahead = self._ahead
        if ahead is None:
            return None
        num_blocks, block_size = self.store.pool.shape[0], self.store.pool.shape[4]
        bytes_per_token = self.store.memory.nbytes // (num_blocks * block_size)
        num_tokens = min(TOKENS_AT_START, BYTES_AT_START // bytes_per_token, num_blocks * block_size // 4)
        ahead.make_ready(-(-num_tokens // block_size))
        return lambda: ahead.num_ready

    def give_way(self, wanted: bool) -> None:
        """Let the last thread take no work while the rest of the program wants the processor. From any thread."""
        self._give_way(self._engine, wanted)

    @property
    def breaks(self) -> dict[str, int]:
        """What torch runs between segments, and how often a step."""
        counts: dict[str, int] = {}
        for name in self.lowered.breaks.values():
            counts[name] = counts.get(name, 0) + 1
        return counts

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[num_samples, vocab_size]`; valid until the next call."""
        return self.forward_flat(as_arrays(batch))

    def forward_flat(self, flat: Flat) -> Tensor:
        """The same for arrays."""
        num_tokens, num_samples = len(flat.token_ids), len(flat.sample_rows)
        self._reserve(num_tokens, num_samples)
        if self._ahead is not None and len(flat.block_tables):
            self._ahead.reach(max(flat.block_tables))
        step = _step(flat)
        rows = {abi.Domain.TOKENS: num_tokens, abi.Domain.SAMPLES: num_samples}
        batch = as_tensors(flat) if self.lowered.breaks else None
        plan: Any = None
        for segment in self.lowered.segments:
            if segment.end != NOWHERE:
                assert self._lib is not None
                self._lib.hr_run(self._engine, ctypes.byref(step), segment.first, segment.end)
                continue
            assert batch is not None
            plan = plan or self._between.plan(batch)
            self._break(segment.first, rows, batch, plan)
        # Two slices of a tensor take longer than the rest of what surrounds a step.
        if self._logits is None or self._logits.shape[0] != num_samples:
            self._logits = self._view(len(self.program.ops) - 1, rows)
        return self._logits

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy KV blocks, (source, target), all layers."""
        self.store.copy(pairs)

    def profile(self, flat: Flat, rounds: int) -> dict[str, float]:
        """Seconds of each part of a step run alone, best of *rounds*, summed over the layers; without torch's parts.

        Parts follow one another as in a step, so that each finds the caches as the one before it left them.
        """
        assert self._lib is not None
        self._reserve(len(flat.token_ids), len(flat.sample_rows))
        step = _step(flat)
        best = [float("inf")] * len(self._ops)
        for _ in range(rounds):
            for i in range(len(self._ops)):
                started = perf_counter()
                self._lib.hr_run(self._engine, ctypes.byref(step), i, i + 1)
                best[i] = min(best[i], perf_counter() - started)
        parts: dict[str, float] = {}
        for i, seconds in enumerate(best):
            name = self._part(i)
            parts[name] = parts.get(name, 0.0) + seconds
        return parts

    def _part(self, index: int) -> str:
        op = self._ops[index]
        name = abi.Kind(op.kind).name.lower()
        if op.kind == abi.Kind.MATMUL:
            matrix = self._matrices[op.matrix]
            name += f" {matrix.n}x{matrix.k} {abi.Storage(matrix.storage).name.lower()}"
        return name

    def limits(self, num_bytes: int = 256 << 20, rounds: int = 5) -> tuple[float, float]:
        """What the machine can do: bytes read a second, and integer products a second in registers alone."""
        assert self._lib is not None
        read, products = ctypes.c_double(), ctypes.c_double()
        self._lib.hr_limits(self._engine, num_bytes, rounds, ctypes.byref(read), ctypes.byref(products))
        return read.value, products.value

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a step multiplies with."""
        return sum(matrix.nbytes for matrix in self.lowered.matrices if isinstance(matrix, Packed))

    def _break(self, index: int, rows: Mapping[abi.Domain, int], batch: Batch, plan: Any) -> None:
        op = self.program.ops[index]
        operands = {x: self._view(x, rows) for x in p.operands(op)}
        self._view(index, rows).copy_(self._between.run(op, operands, batch, plan))

    def _view(self, value: int, rows: Mapping[abi.Domain, int]) -> Tensor:
        place = self.lowered.places[value]
        return self._floats.tensors[place.buf][: rows[place.domain], place.off : place.off + place.width]

    def _reserve(self, num_tokens: int, num_samples: int) -> None:
        for domain, wanted in ((abi.Domain.TOKENS, num_tokens), (abi.Domain.SAMPLES, num_samples)):
            if wanted <= self._rows[domain]:
                continue
            rows = -(-wanted // MORE_ROWS) * MORE_ROWS
            self._rows[domain] = rows
            self._logits = None
            self._floats.grow(domain, rows)
            self._ints.grow(domain, rows)
            if domain is abi.Domain.TOKENS:
                self._turns.grow(rows)

    def _describe(self) -> abi.Program:
        return abi.Program(
            ops=self._ops,
            matrices=self._matrices,
            buffers=self._floats.structs,
            ints=self._ints.structs,
            turns=self._turns.structs,
            cache=self._cache,
            num_ops=len(self._ops),
            num_matrices=len(self._matrices),
            num_buffers=len(self.lowered.buffers),
            num_ints=len(self.lowered.ints),
            num_turns=len(self.lowered.turns),
            scratch_floats=self.lowered.scratch_floats,
        )


def _step(flat: Flat) -> abi.Step:
    """Pointers into *flat*, which must outlive it."""
    arrays = (
        flat.token_ids,
        flat.positions,
        flat.cu_tokens,
        flat.seq_lens,
        flat.cu_blocks,
        flat.block_tables,
        flat.sample_rows,
    )
    addresses = (numbers.buffer_info()[0] for numbers in arrays)
    return abi.Step(*addresses, len(flat.token_ids), len(flat.seq_lens), len(flat.sample_rows))


def packed_of(linear: Linear) -> Packed | None:
    """What the library can multiply with instead of *linear*, if there is that."""
    packed = getattr(linear, "packed", None)
    if isinstance(packed, Packed):
        return packed
    weight = getattr(linear, "weight", None)
    # A subclass may say float32 and be something else, as quantized tensors of other libraries do.
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, Parameter):
        return None
    fits = weight.dtype is torch.float32 and weight.ndim == 2
    return pack_floats(weight, getattr(linear, "bias", None)) if fits else None


class _Memory:
    """Float buffers `[rows, width]`."""

    def __init__(self, spaces: list[Space]) -> None:
        self._spaces = spaces
        self.structs = (abi.Buffer * len(spaces))()
        self.tensors = [torch.empty(0, space.width) for space in spaces]

    def grow(self, domain: abi.Domain, rows: int) -> None:
        for i, space in enumerate(self._spaces):
            if space.domain is domain:
                tensor = self.tensors[i] = torch.empty(rows, space.width)
                self.structs[i] = abi.Buffer(tensor.data_ptr(), space.width)


class _IntMemory:
    """Integer buffers: `[rows, width]` of 8 bits, or of bfloat16, and three floats for each group of 32, or four."""

    def __init__(self, spaces: list[Space], *, value_bytes: int) -> None:
        self._spaces = spaces
        self._value_bytes = value_bytes
        self.structs = (abi.Ints * len(spaces))()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def grow(self, domain: abi.Domain, rows: int) -> None:
        for i, space in enumerate(self._spaces):
            if space.domain is domain:
                q = torch.zeros(rows, space.width * self._value_bytes, dtype=torch.int8)
                per_group = 4 if space.fine else 3
                scales = torch.zeros(rows, space.width // 32 * per_group)
                self._kept[i] = q, scales
                self.structs[i] = abi.Ints(q.data_ptr(), scales.data_ptr(), space.width, per_group)


class _Turns:
    """Cosines and sines of a step's positions."""

    def __init__(self, turns: list[tuple[tuple[float, ...], float]]) -> None:
        self._frequencies = [torch.tensor(frequencies, dtype=torch.float32) for frequencies, _ in turns]
        self._magnitudes = [magnitude for _, magnitude in turns]
        self.structs = (abi.Turn * len(turns))()
        self._kept: list[Tensor] = []

    def grow(self, rows: int) -> None:
        self._kept = []
        for i, frequencies in enumerate(self._frequencies):
            pairs = len(frequencies)
            table = torch.empty(2, rows, pairs)
            self._kept.append(table)
            self.structs[i] = abi.Turn(
                frequencies.data_ptr(), pairs, self._magnitudes[i], table[0].data_ptr(), table[1].data_ptr()
            )


def _matrices(lowered: Lowered) -> Any:
    structs = (abi.Matrix * len(lowered.matrices))()
    for i, matrix in enumerate(lowered.matrices):
        if isinstance(matrix, Packed):
            bias = None if matrix.bias is None else matrix.bias.data_ptr()
            structs[i] = abi.Matrix(
                int(matrix.storage), matrix.n, matrix.k, int(i in lowered.gated), matrix.data.data_ptr(), bias
            )
        else:
            n, k = matrix.shape
            structs[i] = abi.Matrix(int(abi.Storage.ROWS), n, k, 0, matrix.data_ptr(), None)
    return structs


def _cache(store: KVStore, program: p.Program, native: bool) -> abi.Cache:
    if not native:
        return abi.Cache()
    pool, size = store.pool, store.pool.element_size()
    assert pool.dtype in (torch.int8, torch.int16)
    return abi.Cache(pool.data_ptr(), *(pool.stride(i) * size for i in range(4)), pool.shape[4], 8 * size)


def _expert_names(program: p.Program) -> list[str]:
    """Matrices that only torch's mixture of experts multiplies with."""
    names = []
    for op in program.ops:
        if isinstance(op, p.Moe):
            names.append(op.router)
            names += [name for expert in op.experts for name in (expert.gate, expert.up, expert.down)]
    return names
