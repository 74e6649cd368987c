"""How many KV cache blocks fit, decided before anything is allocated and printed at start.

Receives numbers of bytes and tokens, gives a `MemoryPlan`; pure functions that know neither models nor devices.
`memory` says how much there is.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ...hooks.errors import MemoryPlanError

HEADROOM: Final = 0.2
CPU_SHARE: Final = 0.5
UNASKED_BLOCKS: Final = 65536
"""Blocks that somebody else is asked to hold at most, unless the operator says how many."""


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """What memory is used for, and how many tokens that leaves room for.

    Attributes:
        available_bytes: before weights are loaded.
        weight_bytes: as they will lie in memory.
        step_bytes: what one step needs at its peak, besides weights and KV cache.
        step_measured: by a dummy step; False: estimated from shapes.
        headroom: part of the available memory, 0 … 1, that the default size of the KV cache leaves unused.
        bytes_per_token: keys and values of one token, all layers.
        block_size: tokens a block.
        num_blocks: usable ones; *kv_bytes* hold one more, the null block.
        kv_bytes: the whole KV cache.
        max_model_len: tokens a sequence may have.
    """

    available_bytes: int
    weight_bytes: int
    step_bytes: int
    step_measured: bool
    headroom: float
    bytes_per_token: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_sequences_at_full_length(self) -> int:
        return self.num_blocks // blocks_for(self.max_model_len, self.block_size)

    def describe(self) -> str:
        """Aligned lines for people: what is there, what is subtracted, what is left and what it means."""
        unused = self.available_bytes - self.weight_bytes - self.step_bytes - self.kv_bytes
        rows = [
            ("available memory", human(self.available_bytes), ""),
            ("weights", human(self.weight_bytes), ""),
            ("one step", human(self.step_bytes), "measured" if self.step_measured else "estimated, not measured"),
            (
                "KV cache",
                human(self.kv_bytes),
                f"{self.num_blocks:,} blocks of {self.block_size} tokens, {human(self.bytes_per_token)} a token",
            ),
            (
                "headroom",
                human(unused),
                f"{unused / max(self.available_bytes, 1):.0%} of what is available; by default {self.headroom:.0%}",
            ),
            (
                "room for",
                f"{self.num_tokens:,} tokens",
                f"{self.num_sequences_at_full_length:,} sequences of {self.max_model_len:,} tokens",
            ),
        ]
        width = max(len(size) for _, size, _ in rows)
        return "\n".join(f"{what:<16}  {size:>{width}}  {note}".rstrip() for what, size, note in rows)


class BlockPlan(Struct, frozen=True, kw_only=True):
    """How many tokens the line lets in where weights and KV cache are not Headrace's: no bytes are counted.

    Attributes:
        num_blocks: as many tokens as they have room for may be held together.
        settled: False: whoever holds them has not been asked yet, and may have room for fewer.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    settled: bool = True

    def describe(self) -> str:
        """Aligned lines for people, as those of `MemoryPlan`."""
        at_most = "" if self.settled else "at most "
        num_tokens = self.num_blocks * self.block_size
        num_sequences = self.num_blocks // blocks_for(self.max_model_len, self.block_size)
        sequences = f"{num_sequences:,} sequences of {self.max_model_len:,} tokens"
        return (
            f"{'KV cache':<16}  {at_most}{self.num_blocks:,} blocks of {self.block_size} tokens\n"
            f"{'room for':<16}  {at_most}{num_tokens:,} tokens, {sequences}"
        )


def plan_blocks(
    *, max_model_len: int, max_running: int, block_size: int, kv_blocks: int | None = None, held: int | None = None
) -> BlockPlan:
    """Decide how many blocks the line counts with where somebody else holds them.

    By default what *max_running* sequences of full length need, within `UNASKED_BLOCKS`, for the pool's own lists grow
    with it; but one sequence always fits.

    Args:
        kv_blocks: what the operator says instead.
        held: what the holder says that it has; None: as many as it is asked for.

    Raises:
        MemoryPlanError: not even one sequence of *max_model_len* fits, or there are fewer than *kv_blocks*.
    """
    needed = blocks_for(max_model_len, block_size)
    num_blocks = kv_blocks or min(max_running * needed, max(needed, UNASKED_BLOCKS))
    if held is not None and held < num_blocks:
        if kv_blocks is not None:
            raise MemoryPlanError(f"kv_blocks must be at most {held:,}, what the executor holds, and is {kv_blocks:,}")
        num_blocks = held
    if num_blocks < needed:
        room = num_blocks * block_size
        raise MemoryPlanError(
            f"the KV cache must hold one sequence of max_model_len ({max_model_len:,} tokens), which takes {needed:,} "
            f"blocks, and has {num_blocks:,}; set max_model_len to at most {room}, or give it more"
        )
    return BlockPlan(
        block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len, settled=held is not None
    )


def plan(
    *,
    available_bytes: int,
    weight_bytes: int,
    step_bytes: int,
    step_measured: bool,
    bytes_per_token: int,
    max_model_len: int,
    max_running: int,
    block_size: int = 16,
    kv_memory: int | None = None,
    kv_blocks: int | None = None,
    headroom: float = HEADROOM,
    share: float = CPU_SHARE,
) -> MemoryPlan:
    """Decide the size of the KV cache.

    By default it is the smallest of: what *headroom* leaves after weights and one step; *share* of the available memory
    after weights and one step; what *max_running* sequences of full length need.

    Args:
        max_running: sequences that run at the same time.
        kv_memory: bytes for the KV cache instead of the default; may use up the headroom.
        kv_blocks: the same as a number of usable blocks.
        share: 0.5 on a CPU, where others live too; 1 on a device of our own.

    Raises:
        MemoryPlanError: not even one sequence of *max_model_len* fits, or what was asked for is more than there is.
    """
    if kv_memory is not None and kv_blocks is not None:
        raise MemoryPlanError(f"give kv_memory or kv_blocks, not both: got {kv_memory} and {kv_blocks}")
    block_bytes = block_size * bytes_per_token
    left = available_bytes - weight_bytes - step_bytes
    if kv_blocks is not None:
        num_blocks = kv_blocks
    elif kv_memory is not None:
        num_blocks = kv_memory // block_bytes - 1
    else:
        budget = min(int(share * left), left - int(headroom * available_bytes))
        num_blocks = min(budget // block_bytes - 1, max_running * blocks_for(max_model_len, block_size))
    num_blocks = max(num_blocks, 0)
    result = MemoryPlan(
        available_bytes=available_bytes,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        step_measured=step_measured,
        headroom=headroom,
        bytes_per_token=bytes_per_token,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes=(num_blocks + 1) * block_bytes if num_blocks else 0,
        max_model_len=max_model_len,
    )
    _refuse(result, left)
    return result


def _refuse(found: MemoryPlan, left: int) -> None:
    """Raise what is wrong with a plan, given the bytes *left* after weights and one step."""
    block_bytes = found.block_size * found.bytes_per_token
    needed = blocks_for(found.max_model_len, found.block_size)
    most = left // block_bytes - 1
    if most < 1:
        problem = "weights and one step leave no room for a KV cache"
        advice = "free memory, or choose a smaller or more strongly quantized model"
    elif found.kv_bytes > left:
        problem = f"the KV cache must fit into the {human(left)} that weights and one step leave"
        advice = f"set kv_memory to at most {left} bytes, or kv_blocks to at most {most}"
    elif found.num_blocks < needed:
        problem = (
            f"the KV cache must hold one sequence of max_model_len ({found.max_model_len:,} tokens), which takes "
            f"{needed:,} blocks, and has {found.num_blocks:,}"
        )
        advice = (
            f"set kv_memory to {(needed + 1) * block_bytes} … {left} bytes"
            if needed <= most
            else "free memory, or choose a smaller or more strongly quantized model"
        )
        if found.num_blocks:
            advice = f"set max_model_len to at most {found.num_tokens}, or {advice}"
    else:
        return
    raise MemoryPlanError(f"{problem}; {advice}\n{found.describe()}")


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that *num_tokens* of one sequence need."""
    return -(-num_tokens // block_size)


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Keys and values of one token in all layers. It is the key-value heads that count, not those of the queries."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes


def estimate_step_bytes(
    *,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_step_tokens: int,
    max_running: int,
    max_model_len: int,
    dtype_bytes: int = 4,
) -> int:
    """What one step needs at its peak besides weights and KV cache: an upper estimate from shapes alone.

    Three phases whose memory is never needed at the same time. In a layer, beside the residual and its norm: attention
    (queries, keys, values, their rotated copies, the result, and one sequence's gathered keys and values), or the MLP
    (gate, up, their product, the result). After the layers: the logits of *max_running* rows, a copy that is
    processed, probabilities and their order.
    """
    residual = 2 * max_step_tokens * hidden_size
    heads = (3 * num_heads + 4 * num_kv_heads) * head_dim
    attention = max_step_tokens * heads + 2 * max_model_len * num_kv_heads * head_dim
    mlp = max_step_tokens * (3 * intermediate_size + hidden_size)
    # Sampling works in float32 whatever the model computes in, and an order of the vocabulary is int64: 3 · 4 + 8.
    sampling = 20 * max_running * vocab_size
    return max(dtype_bytes * (residual + max(attention, mlp)), sampling)


def human(size: int) -> str:
    """A number of bytes, for people: `45.0 KiB`."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
