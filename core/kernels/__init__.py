"""A Program, run: `reference` interprets it in torch and is the oracle of all tests.

`Batch` is a step as tensors; `Model` is what the compute thread needs of whatever runs the Program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor


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

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[num_samples, vocab_size]`, float32. Writes keys and values of all tokens of the batch."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy KV blocks, (source, target), all layers."""
        ...
