"""The contract of the slot `attention`: what the definition says, through a pool full of garbage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from msgspec import Struct
from torch import Tensor

from ...core.kernels import Batch
from .contract import Contract, ensure, skip
from .plain import PlainAttention

NUM_BLOCKS = 40


class Shape(Struct, frozen=True, kw_only=True):
    """What a model asks of its attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    scale: float = 0.25


def garbage(dtype: torch.dtype) -> float:
    """What slots hold that were never written: NaN, and so is a float32 made of such integers of 16 or 8 bits."""
    return torch.nan if dtype.is_floating_point else 0x7FC0 if dtype.itemsize == 2 else -1


class AttentionContract(Contract):
    """Runs ragged batches through pools that hold NaN wherever no token was written.

    Attributes:
        head_dims: sizes of a head to try; those that `supports` refuses are left out, but for at least one.
        block_size: tokens a block.
        tolerance: absolute difference to attention in float64.
    """

    slot = "attention"
    head_dims: ClassVar[Sequence[int]] = (8, 64)
    block_size: ClassVar[int] = 16
    tolerance: ClassVar[float] = 1e-3

    def shapes(self) -> list[Shape]:
        """Those that the component supports."""
        wanted = [
            Shape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window, softcap=softcap)
            for head_dim in self.head_dims
            for heads, kv_heads in ((4, 4), (6, 2), (3, 1))
            for window in (None, 1, 5, 33)
            for softcap in (None, 2.0)
        ]
        found = [shape for shape in wanted if self._refusal(shape) is None]
        if not found:
            skip(f"it supports none of the shapes that are tried: {self._refusal(wanted[0])}; set head_dims")
        return found

    def test_supports_says_why_not(self) -> None:
        """None, or a reason; and heads that cannot be shared out are refused."""
        for shape in self.shapes():
            reason = self._refusal(shape)
            ensure(reason is None, f"supports must give None or a reason, found {reason!r}")
        odd = self._refusal(Shape(num_heads=3, num_kv_heads=2, head_dim=self.shapes()[0].head_dim))
        ensure(isinstance(odd, str), f"3 heads over 2 KV heads must be refused with a reason, found {odd!r}")

    def test_it_attends_as_the_definition_says(self) -> None:
        """Prefills, chunks of them and decodes in one batch, with and without window and softcap."""

        def check(shape: Shape, seed: int) -> None:
            trial = self._trial(shape, seed)
            answers: list[list[Tensor]] = []
            for attention, pool in ((self.build(), trial.pool()), (PlainAttention(), trial.plain_pool())):
                answers.append([trial.run(attention, pool, step) for step in trial.steps])
            found, wanted = answers
            for ours, theirs in zip(found, wanted, strict=True):
                self._compare(ours, theirs, f"with {shape}")

        self.for_all(st.sampled_from(self.shapes()), st.integers(0, 2**16), check=check)

    def test_a_sequence_is_the_same_alone_and_in_company(self) -> None:
        def check(shape: Shape, seed: int) -> None:
            trial = self._trial(shape, seed)
            attention, pool = self.build(), trial.pool()
            together = [trial.run(attention, pool, step) for step in trial.steps]
            for sequence in range(trial.num_seqs):
                alone = trial.pool()
                for step, company in zip(trial.steps, together, strict=True):
                    rows = step.rows(sequence)
                    if not rows:
                        continue
                    found = trial.run(self.build(), alone, step.only(sequence))
                    self._compare(found, company[rows], "a sequence must come to the same alone and in company")

        self.for_all(st.sampled_from(self.shapes()), st.integers(0, 2**16), check=check)

    def test_a_chunk_is_the_same_as_the_whole(self) -> None:
        """A prompt computed at once, and the same in two parts."""

        def check(shape: Shape, seed: int, cut: int) -> None:
            length = 40
            trial = self._trial(shape, seed, lengths=[length])
            attention = self.build()
            whole = trial.run(attention, trial.pool(), _Step(trial, [(0, 0, length)]))
            pool = trial.pool()
            parts = [trial.run(attention, pool, _Step(trial, [(0, *part)])) for part in ((0, cut), (cut, length))]
            self._compare(torch.cat(parts), whole, "a prompt must come to the same in parts")

        self.for_all(st.sampled_from(self.shapes()), st.integers(0, 99), st.integers(1, 39), check=check)

    def test_write_touches_the_places_of_its_tokens_alone(self) -> None:
        """The rest of a block may be another step's, and the pool is shared by all layers."""

        def check(shape: Shape, seed: int) -> None:
            trial = self._trial(shape, seed)
            attention, pool = self.build(), trial.pool()
            for step in trial.steps:
                before = pool.clone()
                trial.run(attention, pool, step)
                changed = (pool != before) & ~(pool.isnan() & before.isnan())
                ensure(not changed[:, 0].any(), "write must touch its own layer alone, others of the pool changed")
                found = changed[:, 1].flatten(3).sum(-1)
                most = trial.num_written(step)[:, None, None] * (shape.head_dim + trial.extra)
                ensure(
                    bool((found <= most).all()),
                    "write must touch the places of its tokens alone, more of a block changed than they need",
                )

        self.for_all(st.sampled_from(self.shapes()), st.integers(0, 2**16), check=check)

    def test_it_leaves_what_it_is_given_as_it_is(self) -> None:
        for shape in self.shapes()[:3]:
            trial = self._trial(shape, 1)
            given = [tensor.clone() for tensor in (trial.query, trial.key, trial.value)]
            for step in trial.steps:
                trial.run(self.build(), trial.pool(), step)
            same = all(torch.equal(a, b) for a, b in zip(given, (trial.query, trial.key, trial.value), strict=True))
            ensure(same, "attention must not write to queries, keys or values")

    def _trial(self, shape: Shape, seed: int, lengths: Sequence[int] | None = None) -> _Trial:
        attention = self.build()
        dtype: torch.dtype = getattr(torch, getattr(attention, "kv_dtype", "float32"))
        return _Trial(shape, self.block_size, seed, dtype, getattr(attention, "kv_extra", 0), lengths)

    def _refusal(self, shape: Shape) -> str | None:
        reason: str | None = self.build().supports(
            head_dim=shape.head_dim,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            window=shape.window,
            softcap=shape.softcap,
            device="cpu",
        )
        return reason

    def _compare(self, found: Tensor, wanted: Tensor, what: str) -> None:
        ensure(
            found.shape == wanted.shape,
            f"{what}: attend must give back {list(wanted.shape)}, found {list(found.shape)}",
        )
        error = (found - wanted).abs().max().item()
        ensure(
            error <= self.tolerance, f"{what}: the answer must be right to {self.tolerance:g}, it is off by {error:.3g}"
        )


class _Trial:
    """Random sequences, their blocks, and the steps that compute them: first parts of prompts, then the rest, then one
    token each."""

    def __init__(
        self,
        shape: Shape,
        block_size: int,
        seed: int,
        dtype: torch.dtype,
        extra: int,
        lengths: Sequence[int] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.block_size, self.dtype, self.extra = shape, block_size, dtype, extra
        self.lengths = list(lengths or torch.randint(2, 50, (3,), generator=generator).tolist())
        self.num_seqs = len(self.lengths)
        blocks = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
        self.tables = [torch.tensor([blocks.pop() for _ in range(-(-length // block_size))]) for length in self.lengths]
        self.starts = [sum(self.lengths[:i]) for i in range(self.num_seqs)]
        total = sum(self.lengths)
        self.query = torch.randn(total, shape.num_heads, shape.head_dim, generator=generator) * 2
        self.key = torch.randn(total, shape.num_kv_heads, shape.head_dim, generator=generator)
        self.value = torch.randn(total, shape.num_kv_heads, shape.head_dim, generator=generator)
        cuts = [seed % (length - 1) + 1 for length in self.lengths]
        ends = [max(cut, length - 1) for cut, length in zip(cuts, self.lengths, strict=True)]
        rounds = [
            [(i, 0, cuts[i]) for i in range(self.num_seqs)],
            [(i, cuts[i], ends[i]) for i in range(self.num_seqs)],
            [(i, ends[i], self.lengths[i]) for i in range(self.num_seqs)],
        ]
        self.steps = [_Step(self, parts) for each in rounds if (parts := [part for part in each if part[1] < part[2]])]

    def pool(self) -> Tensor:
        """`[num_blocks, 2 layers, …]`, all garbage but the null block."""
        return self._pool(self.dtype, self.extra)

    def plain_pool(self) -> Tensor:
        """The same for `PlainAttention`."""
        return self._pool(torch.float32, 0)

    def _pool(self, dtype: torch.dtype, extra: int) -> Tensor:
        shape = (NUM_BLOCKS, 2, 2, self.shape.num_kv_heads, self.block_size, self.shape.head_dim + extra)
        pool = torch.full(shape, garbage(dtype), dtype=dtype)
        pool[0] = 0
        return pool

    def num_written(self, step: _Step) -> Tensor:
        """Tokens of *step* in each block, `[num_blocks]`."""
        counts = torch.zeros(NUM_BLOCKS, dtype=torch.long)
        for sequence, start, stop in step.parts:
            blocks = self.tables[sequence][torch.arange(start, stop) // self.block_size]
            counts += torch.bincount(blocks, minlength=NUM_BLOCKS)
        return counts

    def run(self, attention: Any, pool: Tensor, step: _Step) -> Tensor:
        """One step in the second layer of *pool*."""
        shape, rows = self.shape, step.tokens
        plan = attention.plan(step.batch)
        attention.write(pool[:, 1], self.key[rows], self.value[rows], plan)
        query = self.query[rows]
        given = query.clone()
        out: Tensor = attention.attend(
            query, pool[:, 1], plan, scale=shape.scale, window=shape.window, softcap=shape.softcap
        )
        ensure(torch.equal(query, given), "attend must not write to the queries")
        return out


class _Step:
    """Parts of sequences, (sequence, first position, last + 1); one token each comes first."""

    def __init__(self, trial: _Trial, parts: Sequence[tuple[int, int, int]]) -> None:
        self._trial = trial
        self.parts = sorted(parts, key=lambda part: part[2] - part[1] > 1)
        counts = [stop - start for _, start, stop in self.parts]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self.tokens = torch.cat([torch.arange(start, stop) + trial.starts[i] for i, start, stop in self.parts])
        self.batch = Batch(
            token_ids=self.tokens,
            positions=torch.cat([torch.arange(start, stop) for _, start, stop in self.parts]),
            cu_tokens=starts,
            seq_lens=[stop for _, _, stop in self.parts],
            block_tables=[trial.tables[i] for i, _, _ in self.parts],
            block_size=trial.block_size,
            sample_rows=torch.tensor([starts[-1] - 1]),
            num_decodes=sum(count == 1 for count in counts),
        )

    def rows(self, sequence: int) -> list[int]:
        """Which of the step's rows are of *sequence*."""
        found = [range(*self.batch.cu_tokens[i : i + 2]) for i, part in enumerate(self.parts) if part[0] == sequence]
        return list(found[0]) if found else []

    def only(self, sequence: int) -> _Step:
        """The part of *sequence*."""
        return _Step(self._trial, [part for part in self.parts if part[0] == sequence])
