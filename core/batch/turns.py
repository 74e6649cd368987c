"""Whose turn it is, where all tenants shall get the same: start-time fair queueing, in tokens.

Every sequence is given a turn when it comes; a policy may start them in that order. Knows neither blocks nor channels.

Source: Goyal, Vin and Cheng 1996, Start-time Fair Queueing, SIGCOMM, with equal weights.
"""

from __future__ import annotations

FORGET_ABOVE = 1024
"""Tenants remembered; above that, those that have used least are forgotten."""


class Turns:
    """The virtual time of the line, and where each tenant stands in it."""

    __slots__ = ("_next", "_now")

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}

    def take(self, tenant: str, num_tokens: int) -> float:
        """The turn of a request that may take *num_tokens*. A tenant that was away has saved nothing up."""
        turn = max(self._now, self._next.get(tenant, 0.0))
        self._next[tenant] = turn + num_tokens
        return turn

    def started(self, turn: float) -> None:
        """Somebody's *turn* has come: nobody who comes from now on has an earlier one."""
        self._now = max(self._now, turn)
        if len(self._next) > FORGET_ABOVE:
            # Those that are furthest ahead have most to gain from being forgotten.
            ahead = sorted(self._next.items(), key=lambda item: item[1], reverse=True)[: FORGET_ABOVE // 2]
            self._next = {tenant: place for tenant, place in ahead if place > self._now}

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """Of what a request might have taken, *num_tokens* were not."""
        if tenant in self._next:
            self._next[tenant] -= num_tokens
