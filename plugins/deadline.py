"""Scheduler policy `deadline`: who has to be done first starts first.

A request's deadline is the end of its own time limit (`headrace.timeout_s`, or the header `x-request-timeout-ms`). One
without a limit, or with a longer one, counts as if it had *default_s* seconds from its arrival.

The bound: no request is overtaken by one that arrives more than *default_s* seconds after it. When not all can be in
time, some will be late, and which ones is not chosen well: bound the line's load by other means.

Source: Liu and Layland 1973, Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment, J. ACM 20(1),
section 7.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..hooks.protocols import Context, Register, RunningView, WaitingView
from ..hooks.registry import plugin

headrace_api = 1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    default_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds from its arrival that a request without a time limit counts as having."""


class EarliestDeadlineFirst:
    """Sorts by deadline; of equals, who came first is first."""

    def __init__(self, context: Context, options: Options) -> None:
        self._default_s = options.default_s

    def order(self, waiting: WaitingView, now: float) -> tuple[float, float]:
        return (self._moment(waiting), waiting.arrival)

    def victim(self, running: RunningView) -> tuple[float, float]:
        return (self._moment(running), running.arrival)

    def _moment(self, view: WaitingView | RunningView) -> float:
        latest = view.arrival + self._default_s
        return view.deadline if view.deadline < latest else latest


@plugin
def register_scheduler_policy(register: Register) -> None:
    register("deadline", EarliestDeadlineFirst, config=Options, doc="Who has to be done first starts first.")
