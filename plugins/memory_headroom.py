"""Admission `memory-headroom`: nobody enters while memory is short. Refused with 429.

    [line]
    admission = [{ use = "memory-headroom", options = { min_free_kv = 0.1, min_free_memory = "512MiB" } }]

Without it a request waits in the line until the KV cache has room; with it the client learns at once, and may go to
another server. Blocks that only remember a prefix count as free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from ..core.kv.memory import available_memory
from ..hooks.decode import Bytes
from ..hooks.errors import Overloaded
from ..hooks.messages import Request
from ..hooks.protocols import Context, Load, Register
from ..hooks.registry import plugin

headrace_api = 1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_free_kv: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Share of the KV cache's blocks that must be free."""
    min_free_memory: Bytes | None = None
    """Memory that this process must still be able to take, cgroup included. Unset: not looked at."""
    retry_after_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """When a refused client may ask again."""


class MemoryHeadroom:
    """Looks at the KV cache, and at the machine.

    Args:
        available: bytes that can still be taken.
    """

    def __init__(self, options: Options, available: Callable[[], int] = available_memory) -> None:
        self._options = options
        self._available = available

    async def admit(self, request: Request, load: Load) -> None:
        """See `protocols.Admission`."""
        options = self._options
        if load.num_free_blocks < options.min_free_kv * load.num_blocks:
            raise self._refusal(
                f"{options.min_free_kv:.0%} of the KV cache must be free, found {load.num_free_blocks} of "
                f"{load.num_blocks} blocks"
            )
        least = options.min_free_memory
        if least is not None and (available := self._available()) < least:
            raise self._refusal(f"{least} bytes of memory must be free, found {available}")

    def _refusal(self, reason: str) -> Overloaded:
        return Overloaded(
            f"for a request to enter, {reason}; try again later",
            code="out_of_memory",
            retry_after_s=self._options.retry_after_s,
        )


def build(context: Context, options: Options) -> MemoryHeadroom:
    return MemoryHeadroom(options)


@plugin
def register_admission(register: Register) -> None:
    register("memory-headroom", build, config=Options, doc="Nobody enters while memory is short.")
