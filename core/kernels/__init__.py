"""A Program, run: `reference` interprets it in torch and is the oracle of all tests, `native` runs it compiled.

`Flat` is a step as arrays, `Batch` the same as tensors; `Model` is what the compute thread needs of whatever runs the
Program.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor


class Flat(Struct, frozen=True, kw_only=True):
    """A ragged batch as int32 arrays, block tables one after the other. For the rest see `Batch`.

    Attributes:
        cu_blocks: `[num_seqs + 1]`; sequence i has blocks `block_tables[cu_blocks[i]:cu_blocks[i + 1]]`.
    """

    token_ids: array[int]
    positions: array[int]
    cu_tokens: array[int]
    seq_lens: array[int]
    cu_blocks: array[int]
    block_tables: array[int]
    sample_rows: array[int]
    block_size: int
    num_decodes: int


class Batch(Struct, frozen=True, kw_only=True):
    """A ragged batch, decode rows first. Sequence i owns tokens `cu_tokens[i]:cu_tokens[i + 1]`.

    Attributes:
        token_ids: `[num_tokens]`, int64.
        positions: `[num_tokens]`, int64, counted from the start of each sequence.
        cu_tokens: `[num_seqs + 1]`, on the host.
        seq_lens: `[num_seqs]`, on the host: tokens in the KV cache after this step, those of the step included.
        block_tables: `[num_seqs]` int64 tensors; token p of a sequence lies in block `p // block_size`.
        block_size: tokens a block.
        sample_rows: `[num_samples]`, int64, the tokens whose logits are wanted; repeats are allowed.
        num_decodes: how many sequences, from the front, compute exactly one token each.
    """

    token_ids: Tensor
    positions: Tensor
    cu_tokens: list[int]
    seq_lens: list[int]
    block_tables: list[Tensor]
    block_size: int
    sample_rows: Tensor
    num_decodes: int


class Model(Protocol):
    """Runs one Program on its weights and its KV cache. Compute thread only."""

    vocab_size: int
    """Rows of the embedding, and columns of the logits."""

    def forward_flat(self, flat: Flat) -> Tensor:
        """Logits `[num_samples, vocab_size]`, float32, valid until the next call. Writes all keys and values."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy KV blocks, (source, target), all layers."""
        ...


def as_tensors(flat: Flat) -> Batch:
    """The same step for torch."""
    import torch

    def tensor(numbers: array[int]) -> Tensor:
        if not numbers:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(numbers, dtype=torch.int32).to(torch.int64)

    tables, cu_blocks = tensor(flat.block_tables), flat.cu_blocks
    return Batch(
        token_ids=tensor(flat.token_ids),
        positions=tensor(flat.positions),
        cu_tokens=flat.cu_tokens.tolist(),
        seq_lens=flat.seq_lens.tolist(),
        block_tables=[tables[cu_blocks[i] : cu_blocks[i + 1]] for i in range(len(cu_blocks) - 1)],
        block_size=flat.block_size,
        sample_rows=tensor(flat.sample_rows),
        num_decodes=flat.num_decodes,
    )


def as_arrays(batch: Batch) -> Flat:
    """The same step for compiled code."""
    cu_blocks = array("i", [0])
    tables = array("i")
    for table in batch.block_tables:
        tables.extend(table.tolist())
        cu_blocks.append(len(tables))
    return Flat(
        token_ids=array("i", batch.token_ids.tolist()),
        positions=array("i", batch.positions.tolist()),
        cu_tokens=array("i", batch.cu_tokens),
        seq_lens=array("i", batch.seq_lens),
        cu_blocks=cu_blocks,
        block_tables=tables,
        sample_rows=array("i", batch.sample_rows.tolist()),
        block_size=batch.block_size,
        num_decodes=batch.num_decodes,
    )
