"""The sequences that wait, in the order of the scheduler policy; and whose turn it is to leave.

A policy may fail in any way: whenever it does, whoever came first goes first, until it works again. So the line goes
on whatever a policy does. Keys are kept as plain numbers and strings: no stranger's code runs when they are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from time import perf_counter

from ...hooks.protocols import SchedulerPolicy
from ..containment import Account
from .live import Live

Key = tuple[object, ...]
Entry = tuple[Key, int, Live]
"""Sort key, index of the sequence (which makes it unique), sequence."""


class Waiting:
    """Owns the policy, and who waits for it.

    Args:
        account: the policy's.
        clock: seconds.
    """

    def __init__(self, policy: SchedulerPolicy, account: Account, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._account = account
        self._clock = clock
        self._entries: list[Entry] = []
        self._by_policy = True
        """The keys are the policy's; else those of `arrival`."""

    def __len__(self) -> int:
        return len(self._entries)

    def first(self, count: int) -> list[Live]:
        """Those who start first."""
        return [live for _, _, live in self._entries[:count]]

    def follow(self, policy: SchedulerPolicy, account: Account) -> None:
        """Obey another policy from now on: all that wait get their places from it."""
        self._policy, self._account = policy, account
        if not self._settle_by_policy(self.first(len(self))):
            self._settle_by_arrival()

    def add(self, live: Live) -> None:
        """It begins to wait."""
        if self._account.quarantined is None and self._add_by_policy(live):
            return
        if self._by_policy:
            self._settle_by_arrival()
        self._insert(arrival(live))

    def remove(self, live: Live) -> None:
        """It waits no more."""
        place = bisect_left(self._entries, (live.key, live.sequence.index))
        assert self._entries[place][2] is live, f"{live} does not wait"
        del self._entries[place]

    def victims(self, lives: Iterable[Live]) -> list[Live]:
        """Who leaves first: the parked, then as the policy says."""
        lives = list(lives)
        if self._account.quarantined is None:
            try:
                keys = {live: (live.request.mailbox.parked, *self._victim(live)) for live in lives}
                ordered = sorted(lives, key=keys.__getitem__, reverse=True)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # A stranger may raise anything.
                self._account.failed(error, "victim")
            else:
                self._account.worked("victim")
                return ordered
        return sorted(lives, key=lambda live: (live.request.mailbox.parked, *arrival(live)[0]), reverse=True)

    def _add_by_policy(self, live: Live) -> bool:
        """False: the policy failed, and nothing has changed."""
        if not self._by_policy:
            return self._settle_by_policy([*self.first(len(self)), live])
        return self._obeys(lambda now: self._insert(self._entry(live, now)))

    def _settle_by_policy(self, lives: list[Live]) -> bool:
        """False: as above."""
        if self._obeys(lambda now: self._settle(sorted(self._entry(each, now) for each in lives))):
            self._by_policy = True
            return True
        return False

    def _settle_by_arrival(self) -> None:
        self._by_policy = False
        self._settle(sorted(arrival(each) for each in self.first(len(self))))

    def _obeys(self, change: Callable[[float], None]) -> bool:
        """Whether *change*, which asks the policy, could be made."""
        try:
            change(self._clock())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # As in `victims`; two keys that do not compare are among it.
            self._account.failed(error, "order")
            return False
        self._account.worked("order")
        return True

    def _insert(self, entry: Entry) -> None:
        insort(self._entries, entry)
        entry[2].key = entry[0]

    def _settle(self, entries: list[Entry]) -> None:
        self._entries = entries
        for key, _, live in entries:
            live.key = key

    def _entry(self, live: Live, now: float) -> Entry:
        view = live.waiting_view()
        started = perf_counter()
        try:
            key = self._policy.order(view, now)
        finally:
            self._account.spent(perf_counter() - started, "order")
        return plain(key), live.sequence.index, live

    def _victim(self, live: Live) -> Key:
        view = live.running_view()
        started = perf_counter()
        try:
            key = self._policy.victim(view)
        finally:
            self._account.spent(perf_counter() - started, "victim")
        return plain(key)


def arrival(live: Live) -> Entry:
    """What stands in for a policy that fails: who came first starts first, and who came last leaves first."""
    return (live.request.priority, live.request.arrival), live.sequence.index, live


def plain(key: object) -> Key:
    """A policy's sort key, of Python's own numbers and strings only.

    Raises:
        TypeError, ValueError: it is no tuple, or holds a NaN or something else.
    """
    if not isinstance(key, tuple):
        raise TypeError(f"a sort key must be a tuple, found {type(key).__name__}")
    return tuple([_plain_item(item) for item in key])


def _plain_item(item: object) -> object:
    # First what keys are made of: asking the abstract classes costs more than all the rest of a candidate.
    kind = type(item)
    if kind is int or kind is str or (kind is float and item == item):
        return item
    if isinstance(item, Integral):
        return int(item)
    if isinstance(item, Real):
        if math.isnan(item):
            raise ValueError("a sort key must hold no NaN, for nothing comes before or after one")
        return float(item)
    if isinstance(item, tuple):
        return plain(item)
    raise TypeError(f"a sort key must hold numbers, strings and tuples of them, found {type(item).__name__}")
