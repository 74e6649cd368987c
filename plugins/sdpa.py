"""Attention `sdpa`: each sequence's keys and values are gathered from its blocks and given to torch.

The reference: simple before quick. Only slots that hold a token of the sequence are read, so garbage in
the rest of a block cannot reach an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.kernels import Batch

headrace_api = 1


class Span:
    """One sequence's part of a batch: its rows, the blocks of its tokens, and which keys its rows see."""

    __slots__ = ("_masks", "rows", "seq_len", "table")

    def __init__(self, rows: slice, seq_len: int, table: Tensor) -> None:
        self.rows = rows
        self.seq_len = seq_len
        self.table = table
        self._masks: dict[int | None, Tensor | None] = {}

    def mask(self, window: int | None) -> Tensor | None:
        """`[num_rows, seq_len]` bool, True where a row sees a key; None where it sees all. The same for all layers."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        import torch

        num_rows = self.rows.stop - self.rows.start
        if num_rows == 1 and (window is None or window >= self.seq_len):
            return None
        keys = torch.arange(self.seq_len, device=self.table.device)
        positions = keys[-num_rows:, None]
        seen = keys <= positions
        return seen if window is None else seen & (keys > positions - window)


class Plan:
    """What a step's layers share: where each token's key and value go, and the sequences."""

    __slots__ = ("blocks", "offsets", "spans")

    def __init__(self, batch: Batch) -> None:
        import torch

        block_size = batch.block_size
        self.spans = []
        blocks = []
        for i, seq_len in enumerate(batch.seq_lens):
            rows = slice(batch.cu_tokens[i], batch.cu_tokens[i + 1])
            table = batch.block_tables[i][: -(-seq_len // block_size)]
            self.spans.append(Span(rows, seq_len, table))
            blocks.append(table[batch.positions[rows] // block_size])
        self.blocks = torch.cat(blocks)
        self.offsets = batch.positions % block_size


class Sdpa:
    """Paged attention by gathering, one sequence after the other."""

    def supports(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        window: int | None,
        softcap: float | None,
        device: str,
    ) -> str | None:
        """Everything that has a whole number of query heads for each KV head."""
        if num_heads % num_kv_heads:
            return f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        return None

    def plan(self, batch: Batch) -> Plan:
        """Where tokens go, and what each sequence sees."""
        return Plan(batch)

    def write(self, kv: Tensor, key: Tensor, value: Tensor, plan: Plan) -> None:
        """Store keys and values, each `[num_tokens, num_kv_heads, head_dim]`."""
        import torch

        kv[plan.blocks, :, :, plan.offsets] = torch.stack((key, value), 1)

    def attend(
        self, query: Tensor, kv: Tensor, plan: Plan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal attention of `[num_tokens, num_heads, head_dim]`; same shape back."""
        groups = query.view(len(query), kv.shape[2], -1, query.shape[-1]).permute(1, 2, 0, 3)
        out = query.new_empty(query.shape)
        for span in plan.spans:
            keys, values = self.gather(kv, span)
            answer = _attend(groups[:, :, span.rows], keys, values, span.mask(window), scale, softcap)
            out[span.rows] = answer.flatten(0, 1).transpose(0, 1)
        return out

    def gather(self, kv: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, each `[num_kv_heads, 1, seq_len, head_dim]`."""
        blocks = kv.permute(1, 2, 0, 3, 4).index_select(2, span.table)
        keys, values = blocks.flatten(2, 3)[:, :, None, : span.seq_len]
        return keys, values


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """`[num_kv_heads, group, num_rows, head_dim]` over the keys of each group's KV head; same shape back."""
    import torch

    # Rows that see the same keys are rows of one product, whatever their head: it reads the keys once.
    rows = query.flatten(1, 2)[:, None] if mask is None else query
    if softcap is None:
        keys, values = (x.expand(-1, rows.shape[1], -1, -1) for x in (keys, values))
        answer = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(rows @ keys.mT * (scale / softcap)) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        answer = scores.softmax(-1) @ values
    return answer.reshape(query.shape)


def _build(context: Context, options: None) -> Sdpa:
    return Sdpa()


@plugin
def register_attention(register: Register) -> None:
    """Offer `sdpa`."""
    register("sdpa", _build, doc="torch's scaled dot product attention over gathered blocks; the reference.")
