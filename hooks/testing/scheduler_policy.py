"""The contract of the slot `scheduler_policy`: keys that can be compared, from the views alone, and nobody starves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st

from ..protocols import RunningView, WaitingView
from .contract import Contract, ensure
from .loop import in_loop

BACKLOG = 8
"""Requests that wait in the simulation at all times: one starts a second, and one arrives."""


class SchedulerPolicyContract(Contract):
    """Called directly, and put in charge of a queue under a simulated clock.

    Attributes:
        worst_wait_s: how long any request may wait when as much arrives as is served, eight requests waiting.
        priorities: of the requests in that simulation. A policy that serves priorities strictly has but one here.
        tenants: the same.
    """

    slot = "scheduler_policy"
    worst_wait_s: ClassVar[float] = 300.0
    priorities: ClassVar[Sequence[int]] = (0,)
    tenants: ClassVar[Sequence[str]] = ("", "a", "b")

    def test_its_keys_are_tuples_without_nan(self) -> None:
        """NaN compares with nothing, so that sorting would give any order."""

        def check(waiting: WaitingView, running: RunningView, now: float) -> None:
            policy = self.build()
            for name, key in (("order", policy.order(waiting, now)), ("victim", policy.victim(running))):
                ensure(isinstance(key, tuple), f"{name} must return a tuple, found {key!r}")
                ensure(not any(_is_nan(part) for part in key), f"{name} must return no NaN, found {key!r}")

        self.for_all(_waiting(), _running(), _times(), check=check)

    def test_its_keys_can_all_be_compared(self) -> None:
        def check(waiting: list[WaitingView], running: list[RunningView], now: float) -> None:
            policy = self.build()
            keys = {"order": [policy.order(each, now) for each in waiting], "victim": list(map(policy.victim, running))}
            for name, made in keys.items():
                try:
                    sorted(made)
                except TypeError as error:
                    ensure(False, f"all keys of {name} must be comparable, found {made}: {error}")

        some = st.lists(_waiting(), min_size=2, max_size=6), st.lists(_running(), min_size=2, max_size=6)
        self.for_all(*some, _times(), check=check)

    def test_it_is_a_pure_function_of_what_it_sees(self) -> None:
        """The same view has the same key however often and in whatever order it is asked for."""

        def check(waiting: list[WaitingView], running: list[RunningView], now: float) -> None:
            policy = self.build()
            for name, key_of, views in (
                ("order", lambda view: policy.order(view, now), waiting),
                ("victim", policy.victim, running),
            ):
                first = [key_of(view) for view in views]
                again = [key_of(view) for view in reversed(views)][::-1]
                ensure(first == again, f"{name} must give equal keys for equal views, found {first} and {again}")

        some = st.lists(_waiting(), min_size=1, max_size=6), st.lists(_running(), min_size=1, max_size=6)
        self.for_all(*some, _times(), check=check)

    def test_waiting_does_not_change_the_order(self) -> None:
        """The line asks for a key once, when the wait begins: ageing must be said by a time, as `protocols` does."""

        def check(waiting: list[WaitingView], now: float, later: float) -> None:
            policy = self.build()
            for one, other in itertools.combinations(waiting, 2):
                (a, b), (c, d) = ([policy.order(view, at) for view in (one, other)] for at in (now, now + later))
                ensure(
                    (a < b) == (c < d) and (b < a) == (d < c),
                    f"of two requests the same one must come first at all times, found {a} and {b}, then {c} and {d}",
                )

        # Close to each other, so that one that ages by itself soon passes the other.
        close = st.builds(
            WaitingView,
            arrival=st.integers(0, 100).map(float),
            priority=st.integers(-2, 2),
            num_tokens=st.integers(0, 100),
            num_preemptions=st.integers(0, 1),
            tenant=st.sampled_from(["", "a"]),
            num_left=st.integers(0, 100),
        )
        times = st.sampled_from([100.0, 110.0, 200.0]), st.sampled_from([1.0, 60.0, 1e3, 1e6])
        self.for_all(st.lists(close, min_size=4, max_size=6), *times, check=check)

    def test_nobody_starves(self) -> None:
        """Whoever arrives later: equal, shorter, longer or more important requests, one a second, for a long time."""
        for name, rival in self._rivals().items():
            for own in self._newcomers():
                waited = self._longest_wait(own, rival)
                ensure(
                    waited <= self.worst_wait_s,
                    f"a request must start within {self.worst_wait_s:g} s (worst_wait_s) while {name} keep arriving; "
                    f"one waited {waited:g} s",
                )

    def test_the_first_in_line_is_not_the_first_to_leave(self) -> None:
        """Of requests that differ in nothing but their arrival. Else no request may ever get to its end."""

        def check(arrivals: list[int], template: RunningView) -> None:
            policy = self.build()
            views = {arrival: msgspec.structs.replace(template, arrival=float(arrival)) for arrival in arrivals}
            starts = {arrival: policy.order(_as_waiting(view), 1e6) for arrival, view in views.items()}
            leaves = {arrival: policy.victim(view) for arrival, view in views.items()}
            first = min(starts, key=lambda arrival: starts[arrival])
            rivals = [key for arrival, key in leaves.items() if arrival != first]
            ensure(leaves[first] <= max(rivals), f"the request of second {first} starts first and must not leave first")

        arrivals = st.lists(st.integers(0, 10_000), min_size=2, max_size=5, unique=True)
        self.for_all(arrivals, _running(), check=check)

    def _newcomers(self) -> list[WaitingView]:
        return [
            WaitingView(
                arrival=0.0, priority=priority, num_tokens=size, num_preemptions=0, tenant=tenant, num_left=size
            )
            for priority in self.priorities
            for size in (1, 2000)
            for tenant in self.tenants[:2]
        ]

    def _rivals(self) -> dict[str, Callable[[int], WaitingView]]:
        """Kinds of requests that arrive at a second. The more important ones have deadlines too."""
        most, least = min(self.priorities), max(self.priorities)

        def kind(
            num_tokens: int, priority: int, num_preemptions: int = 0, tenants: Sequence[str] = self.tenants
        ) -> Callable[[int], WaitingView]:
            return lambda second: WaitingView(
                arrival=float(second),
                priority=priority,
                num_tokens=num_tokens,
                num_preemptions=num_preemptions,
                num_left=num_tokens,
                turn=float(second),
                deadline=second + 30.0 if priority == most else math.inf,
                tenant=tenants[second % len(tenants)],
            )

        return {
            "short requests": kind(1, least),
            "long requests": kind(4000, least),
            "important short requests": kind(1, most),
            "important long requests": kind(4000, most),
            "requests of another tenant": kind(500, least, 0, self.tenants[-1:]),
            "requests that had to leave": kind(500, most, 3),
        }

    def _longest_wait(self, own: WaitingView, rival: Callable[[int], WaitingView]) -> float:
        """Seconds that any request waited, those still waiting at the end included."""
        policy, longest = self.build(), 0.0

        def simulate() -> float:
            nonlocal longest
            queue = [(policy.order(own, 0.0), -1, 0.0)]
            queue += [(policy.order(rival(0), 0.0), place, 0.0) for place in range(BACKLOG - 1)]
            # Long enough that a rival may take over the place of the one who waits.
            for second in range(1, int(2 * self.worst_wait_s) + BACKLOG):
                now = float(second)
                queue.append((policy.order(rival(second), now), BACKLOG + second, now))
                started = min(queue)
                queue.remove(started)
                longest = max(longest, now - started[2])
                oldest = min(arrival for _, _, arrival in queue)
                if now - oldest > self.worst_wait_s:
                    return now - oldest
            return longest

        return in_loop(simulate)


def _as_waiting(view: RunningView) -> WaitingView:
    return WaitingView(
        arrival=view.arrival,
        priority=view.priority,
        num_tokens=view.num_tokens,
        num_preemptions=view.num_preemptions,
        tenant=view.tenant,
        num_left=view.num_left,
        turn=view.turn,
        deadline=view.deadline,
    )


def _is_nan(part: Any) -> bool:
    return isinstance(part, float) and math.isnan(part)


def _times() -> st.SearchStrategy[float]:
    return st.floats(0, 1e6)


def _waiting() -> st.SearchStrategy[WaitingView]:
    return st.builds(
        WaitingView,
        arrival=_times(),
        priority=st.integers(-100, 100),
        num_tokens=st.integers(0, 100_000),
        num_preemptions=st.integers(0, 10),
        num_left=st.integers(0, 100_000),
        turn=_times(),
        deadline=_times() | st.just(math.inf),
        tenant=st.sampled_from(["", "a", "é"]),
    )


def _running() -> st.SearchStrategy[RunningView]:
    return st.builds(
        RunningView,
        arrival=_times(),
        priority=st.integers(-100, 100),
        num_tokens=st.integers(0, 100_000),
        num_blocks=st.integers(0, 10_000),
        num_preemptions=st.integers(0, 10),
        num_left=st.integers(0, 100_000),
        turn=_times(),
        deadline=_times() | st.just(math.inf),
        parked=st.booleans(),
    )
