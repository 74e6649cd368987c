"""Scheduler policy `fair-share`: all tenants get the same share of the line, however much each of them asks.

A tenant is the name of a key (slot `auth`); without keys all requests are of one, and this is `fcfs`. Shares are
measured in tokens of prompt and answer. A tenant that was away has saved nothing up, and none is punished for having
used what nobody else wanted.

The bound: while two tenants both have requests waiting, what is started for one exceeds what is started for the other
by at most one request of each, in tokens. So with a bounded number of tenants nobody waits for ever.

Source: Goyal, Vin and Cheng 1996, Start-time Fair Queueing, SIGCOMM; counting tokens as Sheng et al. 2024, Fairness in
Serving Large Language Models, arXiv:2401.00588. The count itself is kept by the line, in `core/batch/turns.py`.
"""

from __future__ import annotations

from ..hooks.protocols import Context, Register, RunningView, WaitingView
from ..hooks.registry import plugin

headrace_api = 1


class FairShare:
    """Sorts by turns; within a turn, who came first is first."""

    def order(self, waiting: WaitingView, now: float) -> tuple[float, float]:
        return (waiting.turn, waiting.arrival)

    def victim(self, running: RunningView) -> tuple[float, float]:
        return (running.turn, running.arrival)


def build(context: Context, options: None) -> FairShare:
    return FairShare()


@plugin
def register_scheduler_policy(register: Register) -> None:
    register("fair-share", build, doc="The same share of tokens for each key.")
