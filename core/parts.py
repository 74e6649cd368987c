"""What a line is made of and what it says of itself: structs without behaviour."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from msgspec import Struct, field

from ..hooks.origins import Where
from ..hooks.protocols import Executor
from ..hooks.settings import Settings
from ..hooks.stack import Stack
from .batch.planner import Limits
from .channel import ChannelStatistics
from .containment import Ledger, PluginCost
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


class Restacked(Struct, frozen=True, kw_only=True):
    """A Stack that was built beside the one that serves.

    Attributes:
        defaults: sampling parameters of requests that do not set them.
        changed: keys of the settings that are not what they were.
        plugins: distributions that were imported anew, as `name version` or `name old → new`.
    """

    stack: Stack
    defaults: Mapping[str, object]
    changed: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


class Reloaded(Struct, frozen=True, kw_only=True):
    """What a reload came to: the fingerprints of the Stack before and of the one that serves now; see `Restacked`."""

    old: str
    new: str
    changed: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


class RestackOffLoop(Protocol):
    """Builds a Stack off the loop: (settings, those that hold now, where the new ones come from, the present Stack)."""

    def __call__(
        self, settings: Settings, before: Settings, where: Callable[[str], Where], old: Stack, /
    ) -> Awaitable[Restacked]: ...


class Parts(Struct, frozen=True, kw_only=True):
    """All that the line is made of, apart from the line itself. Built by `core.build`, or by a test.

    Attributes:
        executor: entered on the loop when the line starts.
        watch: runs beside the line and raises when the executor hangs.
        off_loop: how `tokenize` leaves the loop.
        codec_off_loop: how texts beside the line leave it, so that they do not keep `tokenize` waiting; None: the same.
        report: lines for people, printed at start.
        ledger: where plugins' costs and failures are noted, by the executor too.
        restack: builds another Stack; None: this line keeps the one it has.
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
    ledger: Ledger = field(default_factory=Ledger)
    restack: RestackOffLoop | None = None


class EngineStatistics(Struct, frozen=True, kw_only=True):
    """What there is now, and totals since the start.

    Attributes:
        drafts_total: times tokens were guessed ahead for a sequence.
        kept_by_position: how often the first, second … guess of a draft was right.
        plugins: what each chosen plugin has cost.
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
    plugins: tuple[PluginCost, ...] = ()


class DrainReport(Struct, frozen=True, kw_only=True):
    """How a drain went: requests that finished by themselves, and those that were cut."""

    finished: int
    cut: int
