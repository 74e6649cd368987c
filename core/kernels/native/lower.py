"""Turns a Program into the operations of the compiled library, once, when a model is loaded.

Besides the translation: products of one input become one, a gate and its up become one product that ends in integers,
residuals are added where the product is written, a norm makes the integers its readers want, and from the last
attention on only sampled rows are computed. What the library cannot do stays an operation of the Program, for torch to
run between segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from torch import Tensor

from ....hooks import program as p
from .abi import ACTIVATIONS, Domain, Kind, Op, Ref
from .pack import Packed, interleave, stack

ROW_BY_ROW: Final = (p.Linear, p.Norm, p.LayerNorm, p.Gated, p.Activate, p.Add, p.Scale, p.Softcap, p.Moe, p.Head)
NOWHERE: Final = -1
FOREVER: Final = 1 << 30


class Place(Struct, frozen=True):
    """Where a value lies: columns `off` to `off + width` of a float buffer."""

    buf: int
    off: int
    width: int
    domain: Domain

    @property
    def ref(self) -> Ref:
        return Ref(self.buf, self.off)


class Space(Struct, frozen=True):
    """A buffer: how wide its rows are, and what they stand for; of integers, whether halves of a group have scales."""

    width: int
    domain: Domain
    fine: bool = False


class Segment(Struct, frozen=True):
    """Operations `[first, end)` of the library; or, where *end* is `NOWHERE`, operation *first* of the Program."""

    first: int
    end: int


class Lowered(Struct, frozen=True, kw_only=True):
    """What the library runs.

    Attributes:
        matrices: packed ones, or tables to look rows up in.
        gated: those whose blocks lie gate, up, gate, up.
        turns: distinct (frequencies, magnitude).
        places: value of the Program → where it lies, for what torch reads and writes, and the logits.
        breaks: operations of the Program that torch runs, and why.
        scratch_floats: the widest row that is kept nowhere.
    """

    ops: list[Op]
    matrices: list[Packed | Tensor]
    gated: set[int]
    buffers: list[Space]
    ints: list[Space]
    turns: list[tuple[tuple[float, ...], float]]
    segments: list[Segment]
    places: dict[int, Place]
    breaks: dict[int, str]
    scratch_floats: int


def lower(
    program: p.Program, tensors: Mapping[str, Tensor], packed: dict[str, Packed], *, attention: bool, fine: bool = False
) -> Lowered:
    """Lower *program*.

    Args:
        tensors: weights used as they are, float32.
        packed: matrices the library can multiply; those it takes over are removed.
        attention: whether the library has the KV cache.
        fine: whether integers on their way to keys, values and logits have a scale for each 16 instead of each 32.
    """
    lowering = _Lowering(program, tensors, packed, attention, fine)
    return lowering.run()


class _Spaces:
    """Buffers, given back when their last reader has run."""

    def __init__(self) -> None:
        self.spaces: list[Space] = []
        self._free: dict[Space, list[int]] = {}
        self._until: dict[int, int] = {}

    def take(self, width: int, domain: Domain, until: int, *, fine: bool = False) -> int:
        space = Space(width, domain, fine)
        free = self._free.get(space)
        index = free.pop() if free else len(self.spaces)
        if index == len(self.spaces):
            self.spaces.append(space)
        self._until[index] = until
        return index

    def keep(self, index: int, until: int) -> None:
        self._until[index] = max(self._until[index], until)

    def release(self, now: int) -> None:
        for index in [index for index, until in self._until.items() if until <= now]:
            del self._until[index]
            self._free.setdefault(self.spaces[index], []).append(index)


class _Lowering:
    def __init__(
        self, program: p.Program, tensors: Mapping[str, Tensor], packed: dict[str, Packed], attention: bool, fine: bool
    ) -> None:
        self.program = program
        self.tensors = tensors
        self.packed = packed
        self.attention = attention
        self.fine = fine
        self.ops: list[Op] = []
        self.matrices: list[Packed | Tensor] = []
        self.tables: dict[str, int] = {}
        self.gated: set[int] = set()
        self.floats, self.ints = _Spaces(), _Spaces()
        self.rows = Domain.TOKENS
        """Which rows are computed now."""
        self.places: dict[int, Place] = {}
        self.integers: dict[int, int] = {}
        self.turns: dict[tuple[tuple[float, ...], float], int] = {}
        self.folded_turns: dict[int, int] = {}
        self.done: set[int] = set()
        self.postponed: set[int] = set()
        self.segments: list[Segment] = []
        self.breaks: dict[int, str] = {}
        self.scratch = 16
        self.users: list[list[int]] = [[] for _ in program.ops]
        self.names: dict[str, int] = {}
        for i, op in enumerate(program.ops):
            for x in p.operands(op):
                self.users[x].append(i)
            for name in _matrices(op):
                self.names[name] = self.names.get(name, 0) + 1

    def run(self) -> Lowered:
        ops = self.program.ops
        rotations = [(op.frequencies, op.magnitude) for op in ops if isinstance(op, p.Rotate)]
        self.turns = {turn: i for i, turn in enumerate(dict.fromkeys(rotations))}
        if self.turns:
            self.emit(Kind.TURNS, Domain.TOKENS)
        for i, op in enumerate(ops):
            if i not in self.done:
                self.one(i, op)
            self.floats.release(i)
            self.ints.release(i)
        self._end_segment()
        return Lowered(
            ops=self.ops,
            matrices=self.matrices,
            gated=self.gated,
            buffers=self.floats.spaces,
            ints=self.ints.spaces,
            turns=list(self.turns),
            segments=self.segments,
            places=self.places,
            breaks=self.breaks,
            scratch_floats=self.scratch,
        )

    # ── one operation ─────────────────────────────────────────────────────────────────────────────────────────────

    def one(self, i: int, op: p.Op) -> None:
        match op:
            case p.Linear() if op.weight in self.packed:
                self.linear(i, op)
            case p.Head() if op.weight in self.packed:
                self.head(i, op)
            case p.Norm() | p.LayerNorm():
                self.norm(i, op)
            case p.Rotate():
                self.rotate(i, op)
            case p.Attend() if self.attention:
                self.attend(i, op)
            case p.Gated():
                self.elementwise(i, Kind.GATED, op.gate, op.up, act=ACTIVATIONS[op.activation])
            case p.Activate():
                self.elementwise(i, Kind.ACTIVATE, op.x, act=ACTIVATIONS[op.activation])
            case p.Add():
                self.elementwise(i, Kind.ADD, op.a, op.b)
            case p.Scale():
                self.elementwise(i, Kind.SCALE, op.x, f0=op.factor)
            case p.Softcap():
                self.elementwise(i, Kind.SOFTCAP, op.x, f0=op.cap)
            case p.Embed():
                self.table(i, Kind.EMBED, op.weight)
            case p.Position():
                self.table(i, Kind.POSITION, op.weight)
            case _:
                self.torch(i, op)

    def table(self, i: int, kind: Kind, weight: str) -> None:
        width = self.program.weights[weight].shape[1]
        self.emit(kind, Domain.TOKENS, i, width, matrix=self._table(weight))

    def norm(self, i: int, op: p.Norm | p.LayerNorm, head: int | None = None) -> None:
        """A norm; one that only the head reads waits for the head, which knows the rows it wants."""
        if head is None and self._waits_for_head(i):
            self.postponed.add(i)
            self.places[i] = self.places[op.x]
            return
        x = self.places[op.x]
        kind, inner = (Kind.NORM, len(self.tensors[op.weight])) if isinstance(op, p.Norm) else (Kind.LAYERNORM, x.width)
        fields: dict[str, Any] = {"a": x.ref, "inner": inner, "f0": op.eps, "w0": self.tensors[op.weight].data_ptr()}
        if isinstance(op, p.LayerNorm):
            fields["w1"] = self.tensors[op.bias].data_ptr()
        if head is None:
            self.emit(kind, x.domain, i, x.width, **fields)
        else:
            self._for_head(kind, head, x.width, fields)

    def elementwise(self, i: int, kind: Kind, a: int, b: int | None = None, **fields: Any) -> None:
        at = self.places[a]
        if b is not None:
            fields["b"] = self.places[b].ref
        self.emit(kind, at.domain, i, at.width, a=at.ref, **fields)

    def rotate(self, i: int, op: p.Rotate) -> None:
        """Left to the attention where only that reads what is turned; else a copy is turned."""
        turn, x = self.turns[op.frequencies, op.magnitude], self.places[op.x]
        users = [self.program.ops[user] for user in self.users[i]]
        if self.attention and len(users) == 1 and isinstance(attend := users[0], p.Attend) and self.users[op.x] == [i]:
            self.folded_turns[i] = turn
            self.places[i] = x
            self.floats.keep(x.buf, self.users[i][0])
            assert i in (attend.query, attend.key)
            return
        self.emit(Kind.SCALE, x.domain, i, x.width, a=x.ref, f0=1.0, only_floats=True)
        out = self.places[i].ref
        heads = x.width // op.head_dim
        self.emit(Kind.ROTATE, x.domain, out=out, width=x.width, inner=op.head_dim, heads=heads, freq=turn)

    def attend(self, i: int, op: p.Attend) -> None:
        query, key, value = (self.places[x] for x in (op.query, op.key, op.value))
        shape: dict[str, Any] = {
            "inner": self.program.head_dim,
            "heads": self.program.num_heads,
            "kv_heads": self.program.num_kv_heads,
            "layer": op.layer,
        }
        narrows = self._narrows(i)
        turned = self.folded_turns.get(op.query, NOWHERE)
        freq = self.folded_turns.get(op.key, NOWHERE)
        self.emit(Kind.STORE, Domain.TOKENS, a=key.ref, b=value.ref, out=query.ref, matrix=turned, freq=freq, **shape)
        self.emit(
            Kind.ATTEND,
            Domain.TOKENS,
            i,
            query.width,
            a=query.ref,
            window=op.window or 0,
            f0=op.scale,
            f1=op.softcap or 0.0,
            # A head is written by itself: groups of 32 must not reach over its end.
            only_floats=narrows or self.program.head_dim % 32 != 0,
            gather=int(narrows),
            **shape,
        )
        if narrows:
            self._narrow(i)

    def _narrows(self, i: int) -> bool:
        """Whether what follows attention *i* needs nothing but the sampled rows of what is there."""
        rest = self.program.ops[i + 1 :]
        if not all(isinstance(op, ROW_BY_ROW) for op in rest) or not self._is_packed_head(len(self.program.ops) - 1):
            return False
        # Integers that are still read would have to be made again from floats that are gone.
        return all(self._until(x) <= i for x in self.integers)

    def _narrow(self, i: int) -> None:
        """From attention *i* on, compute sampled rows only: copy what is still read of them."""
        self.rows = Domain.SAMPLES
        for x in [x for x in self.places if x <= i and x not in self.postponed and self._until(x) > i]:
            at = self.places[x]
            self.emit(Kind.SCALE, self.rows, x, at.width, a=at.ref, f0=1.0, gather=1)

    # ── products ──────────────────────────────────────────────────────────────────────────────────────────────────

    def linear(self, i: int, op: p.Linear) -> None:
        if self._gated(i, op) or self._residual(i, op):
            return
        together = [j for j in self.users[op.x] if self._joins(i, j)]
        parts = [self._take(self.program.ops[j].weight) for j in together]  # type: ignore[union-attr]
        matrix = self._add(stack(parts) if len(parts) > 1 else parts[0])
        until = max(self._until(j) for j in together)
        buf = self.floats.take(sum(part.n for part in parts), self.rows, until)
        off = 0
        for j, part in zip(together, parts, strict=True):
            self.places[j] = Place(buf, off, part.n, self.rows)
            off += part.n
            self.done.add(j)
        self.product(matrix, op.x, out=Ref(buf, 0), width=off)

    def _joins(self, i: int, j: int) -> bool:
        """Whether product *j* can be computed with product *i*, of the same input."""
        if i == j:
            return True
        first, op = self.program.ops[i], self.program.ops[j]
        assert isinstance(first, p.Linear)
        if not isinstance(op, p.Linear) or j in self.done or op.weight not in self.packed:
            return False
        a, b = self.packed[first.weight], self.packed[op.weight]
        alone = self._add_of(j) is not None or self._gate_of(j) is not None
        return not alone and a.storage is b.storage and a.n % 16 == 0 and b.n % 16 == 0

    def _gate_of(self, i: int) -> int | None:
        """The `Gated` whose gate and up are products that can be one, *i* being one of them."""
        users = self.users[i]
        if len(users) != 1 or not isinstance(gated := self.program.ops[users[0]], p.Gated):
            return None
        gate, up = self.program.ops[gated.gate], self.program.ops[gated.up]
        if not (isinstance(gate, p.Linear) and isinstance(up, p.Linear)) or gate.x != up.x or gated.gate == gated.up:
            return None
        a, b = self.packed.get(gate.weight), self.packed.get(up.weight)
        if a is None or b is None or a.storage is not b.storage or a.bias is not None or b.bias is not None:
            return None
        alone = self.users[gated.gate] == self.users[gated.up] == users
        return users[0] if alone and a.n % 32 == 0 and gate.weight != up.weight else None

    def _gated(self, i: int, op: p.Linear) -> bool:
        index = self._gate_of(i)
        if index is None:
            return False
        gated = self.program.ops[index]
        assert isinstance(gated, p.Gated)
        gate, up = (self.program.ops[j] for j in (gated.gate, gated.up))
        assert isinstance(gate, p.Linear)
        assert isinstance(up, p.Linear)
        matrix = self._add(interleave(self._take(gate.weight), self._take(up.weight)))
        self.gated.add(matrix)
        outputs = self._outputs(index, self.program.weights[gate.weight].shape[0], self.rows)
        self.done |= {gated.gate, gated.up, index}
        self.product(matrix, op.x, act=ACTIVATIONS[gated.activation], **outputs)
        return True

    def _add_of(self, i: int) -> int | None:
        """The `Add` that alone reads product *i*, if what it adds is there already."""
        users = self.users[i]
        if len(users) != 1 or not isinstance(op := self.program.ops[users[0]], p.Add) or op.a == op.b:
            return None
        other = op.a if op.b == i else op.b
        return users[0] if other in self.places and other not in self.postponed else None

    def _residual(self, i: int, op: p.Linear) -> bool:
        index = self._add_of(i)
        if index is None:
            return False
        added = self.program.ops[index]
        assert isinstance(added, p.Add)
        other = added.a if added.b == i else added.b
        at, until = self.places[other], self._until(index)
        self.done |= {i, index}
        if self._until(other) == index:
            # Nobody else reads it: the sum takes its place.
            self.floats.keep(at.buf, until)
            place = at
        else:
            place = Place(self.floats.take(at.width, at.domain, until), 0, at.width, at.domain)
        self.places[index] = place
        self.product(self._add(self._take(op.weight)), op.x, b=at.ref, out=place.ref, width=at.width)
        return True

    def product(self, matrix: int, x: int, **fields: Any) -> None:
        packed = self.matrices[matrix]
        assert isinstance(packed, Packed)
        if packed.integers:
            fields["qin"] = self._integers(x)
        else:
            fields["a"] = self.places[x].ref
        self.emit(Kind.MATMUL, self.rows, matrix=matrix, **fields)

    def head(self, i: int, op: p.Head) -> None:
        packed = self.packed[op.weight]
        if op.x in self.postponed:
            norm = self.program.ops[op.x]
            assert isinstance(norm, p.Norm | p.LayerNorm)
            self.norm(op.x, norm, head=i)
        elif packed.integers:
            at = self.places[op.x]
            self._for_head(Kind.QUANT, i, at.width, {"a": at.ref})
        fields: dict[str, Any] = {}
        if packed.integers:
            fields["qin"] = self.integers.pop(i)
        elif op.x in self.postponed:
            fields["a"] = self.places.pop(i).ref
        else:
            fields |= {"a": self.places[op.x].ref, "gather": int(self.rows is Domain.TOKENS)}
        self.emit(Kind.MATMUL, Domain.SAMPLES, i, packed.n, matrix=self._table(op.weight), **fields)

    def _for_head(self, kind: Kind, head: int, width: int, fields: Mapping[str, Any]) -> None:
        """The head's input, of sampled rows only: integers, or floats where it multiplies those."""
        op = self.program.ops[head]
        assert isinstance(op, p.Head)
        outputs: dict[str, Any] = {}
        if self.packed[op.weight].integers:
            self.integers[head] = outputs["qout"] = self.ints.take(
                _whole_groups(width), Domain.SAMPLES, head, fine=self.fine
            )
        else:
            buf = self.floats.take(width, Domain.SAMPLES, head)
            self.places[head] = Place(buf, 0, width, Domain.SAMPLES)
            outputs["out"] = Ref(buf, 0)
        gather = int(self.rows is Domain.TOKENS)
        self.emit(kind, Domain.SAMPLES, width=width, gather=gather, **fields, **outputs)

    # ── what torch runs ───────────────────────────────────────────────────────────────────────────────────────────

    def torch(self, i: int, op: p.Op) -> None:
        self._end_segment()
        self.segments.append(Segment(i, NOWHERE))
        self.breaks[i] = type(op).__name__.lower()
        domain = Domain.SAMPLES if isinstance(op, p.Head) else self.places[p.operands(op)[0]].domain
        width = self._width(op)
        self.places[i] = Place(self.floats.take(width, domain, self._until(i)), 0, width, domain)

    def _width(self, op: p.Op) -> int:
        match op:
            case p.Linear() | p.Head():
                return self.program.weights[op.weight].shape[0]
            case p.Attend():
                return self.places[op.query].width
            case _:
                return self.places[p.operands(op)[0]].width

    def _end_segment(self) -> None:
        first = next((segment.end for segment in reversed(self.segments) if segment.end != NOWHERE), 0)
        if first < len(self.ops):
            self.segments.append(Segment(first, len(self.ops)))

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def emit(
        self,
        kind: Kind,
        domain: Domain,
        value: int | None = None,
        width: int = 0,
        *,
        only_floats: bool = False,
        **fields: Any,
    ) -> None:
        """Write an operation; *value* is what of the Program it makes, for which room is found."""
        if value is not None:
            fields |= self._outputs(value, width, domain, only_floats=only_floats)
        op = Op(kind=kind, domain=domain, width=width, qin=NOWHERE, qout=NOWHERE, matrix=NOWHERE, freq=NOWHERE)
        op.a = op.b = op.out = Ref(NOWHERE, 0)
        for name, field in fields.items():
            setattr(op, name, field)
        if op.out.buf == NOWHERE:
            self.scratch = max(self.scratch, op.width)
        self.ops.append(op)

    def _outputs(self, i: int, width: int, domain: Domain, *, only_floats: bool = False) -> dict[str, Any]:
        """Room for value *i*: floats, integers or both, as its readers want."""
        wanted = [] if only_floats else [user for user in self.users[i] if self._wants_integers(user)]
        outputs: dict[str, Any] = {"width": width}
        if wanted and width % 32 == 0:
            fine = self._wants_fine(i)
            self.integers[i] = outputs["qout"] = self.ints.take(width, domain, max(wanted), fine=fine)
        else:
            wanted = []
        if len(wanted) < len(self.users[i]) or not wanted:
            buf = self.floats.take(width, domain, self._until(i))
            self.places[i] = Place(buf, 0, width, domain)
            outputs["out"] = Ref(buf, 0)
        return outputs

    def _wants_integers(self, user: int) -> bool:
        op = self.program.ops[user]
        return isinstance(op, p.Linear) and op.weight in self.packed and self.packed[op.weight].integers

    def _wants_fine(self, i: int) -> bool:
        """Whether a product makes an attention's values of value *i*. The head has integers of its own."""
        ops = self.program.ops

        def is_values(x: int) -> bool:
            return any(isinstance(op := ops[user], p.Attend) and op.value == x for user in self.users[x])

        return self.fine and any(is_values(user) for user in self.users[i])

    def _integers(self, x: int) -> int:
        """The integers of value *x*, made now if they are not there."""
        if x not in self.integers:
            at, fine = self.places[x], self._wants_fine(x)
            self.integers[x] = self.ints.take(_whole_groups(at.width), at.domain, self._until(x), fine=fine)
            self.emit(Kind.QUANT, at.domain, a=at.ref, width=at.width, qout=self.integers[x])
        return self.integers[x]

    def _until(self, i: int) -> int:
        """When value *i* is read last. A norm that waits for the head reads its input only then."""
        return max((self._runs_at(user) for user in self.users[i]), default=FOREVER)

    def _runs_at(self, i: int) -> int:
        return self.users[i][0] if self._waits_for_head(i) else i

    def _waits_for_head(self, i: int) -> bool:
        users = self.users[i]
        norm = isinstance(self.program.ops[i], p.Norm | p.LayerNorm)
        return norm and len(users) == 1 and self._is_packed_head(users[0])

    def _is_packed_head(self, i: int) -> bool:
        op = self.program.ops[i]
        return isinstance(op, p.Head) and op.weight in self.packed

    def _take(self, name: str) -> Packed:
        """A matrix; the last operation that names it takes it away, so that no copy of it stays."""
        self.names[name] -= 1
        return self.packed[name] if self.names[name] else self.packed.pop(name)

    def _add(self, matrix: Packed | Tensor) -> int:
        self.matrices.append(matrix)
        return len(self.matrices) - 1

    def _table(self, name: str) -> int:
        if name not in self.tables:
            self.tables[name] = self._add(self.packed.get(name, self.tensors.get(name)))  # type: ignore[arg-type]
        return self.tables[name]


def _matrices(op: p.Op) -> list[str]:
    return [op.weight] if isinstance(op, p.Linear | p.Head) else []


def _whole_groups(width: int) -> int:
    return -(-width // 32) * 32
