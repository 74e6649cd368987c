"""Scheduler policy `fcfs`: who came first starts first, and who came last gives way when memory is short.

A request's `priority` goes before its arrival; all have the same unless they say otherwise.
"""

from __future__ import annotations

from ..hooks.protocols import Context, Register, RunningView, WaitingView
from ..hooks.registry import plugin

headrace_api = 1


class FirstComeFirstServed:
    """Whoever is first in this order always goes on, so nobody waits for ever."""

    def order(self, waiting: WaitingView, now: float) -> tuple[int, float]:
        return (waiting.priority, waiting.arrival)

    def victim(self, running: RunningView) -> tuple[int, float]:
        return (running.priority, running.arrival)


def build(context: Context, options: None) -> FirstComeFirstServed:
    return FirstComeFirstServed()


@plugin
def register_scheduler_policy(register: Register) -> None:
    register("fcfs", build, doc="First come, first served; the last to come gives way.")
