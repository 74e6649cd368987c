"""Scheduler policy `priority`: the more urgent start first, but nobody waits for ever.

    [line.policy]
    use = "priority"
    options = { level_s = 30, max_lead_s = 300 }

One level of priority is worth as much as having come *level_s* seconds earlier. This is ageing: a request that has
waited *level_s* seconds stands where one of the next more urgent level stands that comes now.

The bound: no request is overtaken by one that arrives more than 2 · *max_lead_s* seconds after it, whatever their
priorities; so it waits at most for the work of those that arrived up to then. Of two that are n levels apart, the less
urgent is not overtaken by one that arrives more than n · *level_s* seconds after it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..hooks.protocols import Context, Register, RunningView, WaitingView
from ..hooks.registry import plugin

headrace_api = 1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds of waiting that one level of priority is worth."""
    max_lead_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds that priority is worth at most, either way. Levels beyond are all the same."""


class Priority:
    """Sorts by the moment at which a request of level 0 would have had to come to stand in the same place."""

    def __init__(self, context: Context, options: Options) -> None:
        self._level_s = options.level_s
        self._least, self._most = -options.max_lead_s, options.max_lead_s

    # Twice the same, for a call from one to the other costs as much as all the rest.
    def order(self, waiting: WaitingView, now: float) -> tuple[float, float]:
        arrival, lag = waiting.arrival, waiting.priority * self._level_s
        if lag > self._most:
            lag = self._most
        elif lag < self._least:
            lag = self._least
        return (arrival + lag, arrival)

    def victim(self, running: RunningView) -> tuple[float, float]:
        arrival, lag = running.arrival, running.priority * self._level_s
        if lag > self._most:
            lag = self._most
        elif lag < self._least:
            lag = self._least
        return (arrival + lag, arrival)


@plugin
def register_scheduler_policy(register: Register) -> None:
    register("priority", Priority, config=Options, doc="The urgent first, with ageing and a bounded wait.")
