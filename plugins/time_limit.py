"""Stop watcher `time-limit`: ends an answer, well and with what there is, when it has taken long enough.

    [sampling]
    stop_watchers = [{ use = "time-limit", options = { max_time_s = 20 } }]

Time counts from the first token of a choice, so waiting in the queue does not shorten an answer. It is looked at when a
token comes: for a limit that also ends a request that gets none, with an error, there is `headrace.timeout_s`.

Source for behaviour: transformers, `max_time`; llama.cpp, `t_max_predict_ms`, which ends at the same place.
"""

from __future__ import annotations

from typing import Annotated

import trio
from msgspec import Meta, Struct

from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_time_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Seconds from the first token after which the answer ends. None: off."""


class TimeWatcher:
    __slots__ = ("_ends_at",)

    def __init__(self, max_time_s: float) -> None:
        self._ends_at = trio.current_time() + max_time_s

    def feed(self, text: str, token_id: int) -> bool:
        """See `protocols.StopWatcher`."""
        return trio.current_time() >= self._ends_at


class TimeLimit:
    def __init__(self, context: Context, options: Params) -> None:
        pass

    def watch(self, params: Params) -> TimeWatcher | None:
        return None if params.max_time_s is None else TimeWatcher(params.max_time_s)


@plugin
def register_stop(register: Register) -> None:
    register("time-limit", TimeLimit, config=Params, params=Params, doc="End answers that take too long.")
