"""What a line is made of and what it says of itself: structs without behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from msgspec import Struct

from ..hooks.protocols import Executor
from ..hooks.stack import Stack
from .batch.planner import Limits
from .channel import ChannelStatistics
from .kv.blocks import BlockPool
from .tokenize import OffLoop

Progress = Callable[[str, int, int], None]
"""Called with (what, bytes done, bytes in all)."""


def quiet(what: str, done_bytes: int, total_bytes: int) -> None:
    """The `Progress` of those who show none."""


class ModelInfo(Struct, frozen=True, kw_only=True):
    """What is served.

    Attributes:
        vocab_size: rows of the embedding: token ids must lie below it.
        created: Unix seconds, when it was loaded.
        fingerprint: of the components behind it.
        aliases: further names under which clients may ask for it.
    """

    name: str
    max_model_len: int
    vocab_size: int
    created: int
    fingerprint: str
    aliases: tuple[str, ...] = ()


class Parts(Struct, frozen=True, kw_only=True):
    """All that the line is made of, apart from the line itself. Built by `core.build`, or by a test.

    Attributes:
        executor: entered on the loop when the line starts.
        watch: runs beside the line and raises when the executor hangs.
        off_loop: how `tokenize` leaves the loop.
        codec_off_loop: how texts beside the line leave it, so that they do not keep `tokenize` waiting; None: the same.
        report: lines for people, printed at start.
    """

    info: ModelInfo
    stack: Stack
    pool: BlockPool
    limits: Limits
    executor: AbstractContextManager[Executor]
    end_ids: frozenset[int]
    max_token_bytes: int
    defaults: Mapping[str, object]
    off_loop: OffLoop
    codec_off_loop: OffLoop | None = None
    watch: Callable[[], Any] | None = None
    report: str = ""


class EngineStatistics(Struct, frozen=True, kw_only=True):
    """What there is now, and totals since the start.

    Attributes:
        drafts_total: times tokens were guessed ahead for a sequence.
        kept_by_position: how often the first, second … guess of a draft was right.
    """

    channels: tuple[ChannelStatistics, ...]
    running: int
    waiting: int
    parked: int
    blocks_total: int
    blocks_used: int
    slots_total: int
    slots_used: int
    preemptions_total: int
    steps_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    guessed_tokens_total: int
    kept_tokens_total: int
    drafts_total: int = 0
    kept_by_position: tuple[int, ...] = ()


class DrainReport(Struct, frozen=True, kw_only=True):
    """How a drain went: requests that finished by themselves, and those that were cut."""

    finished: int
    cut: int
