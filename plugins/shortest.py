"""Scheduler policy `shortest`: who has least left to do starts first, but nobody waits for ever.

    [line.policy]
    use = "shortest"
    options = { token_s = 0.05, prompt_weight = 0.1, max_lag_s = 120 }

How much is left is the prompt, and the answer as far as it may still grow (`max_tokens`; clients that say it are served
sooner). Each token counts as having come *token_s* seconds later, so waiting makes up for length: ageing.

The bound: no request is overtaken by one that arrives more than *max_lag_s* seconds after it.

Source: Schrage 1968, A Proof of the Optimality of the Shortest Remaining Processing Time Discipline, Oper. Res. 16(3).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..hooks.protocols import Context, Register, RunningView, WaitingView
from ..hooks.registry import plugin

headrace_api = 1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token_s: Annotated[float, Meta(gt=0)] = 0.05
    """Seconds of waiting that one token of the answer is worth."""
    prompt_weight: Annotated[float, Meta(ge=0)] = 0.1
    """What a token of the prompt counts, measured by one of the answer: many are computed in one step."""
    max_lag_s: Annotated[float, Meta(gt=0)] = 120.0
    """Seconds that length is worth at most. Whatever is longer is all the same."""


class ShortestFirst:
    """Sorts by arrival, put off by what is left to do."""

    def __init__(self, context: Context, options: Options) -> None:
        self._token_s = options.token_s
        self._prompt_weight = options.prompt_weight
        self._max_lag_s = options.max_lag_s

    # Twice nearly the same, for a call from one to the other costs as much as all the rest.
    def order(self, waiting: WaitingView, now: float) -> tuple[float, float]:
        arrival, most = waiting.arrival, self._max_lag_s
        # All that is known must be computed again by one that was preempted, its answer too.
        lag = (waiting.num_left + self._prompt_weight * waiting.num_tokens) * self._token_s
        return (arrival + (lag if lag < most else most), arrival)

    def victim(self, running: RunningView) -> tuple[float, float]:
        arrival, most = running.arrival, self._max_lag_s
        lag = running.num_left * self._token_s
        return (arrival + (lag if lag < most else most), arrival)


@plugin
def register_scheduler_policy(register: Register) -> None:
    register("shortest", ShortestFirst, config=Options, doc="The shortest first, with ageing.")
