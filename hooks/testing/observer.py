"""The contract of the slot `observer`: whatever happened, it is told quickly and raises nothing."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from msgspec import Struct

from ..protocols import Event, RequestEnded, StepDone, TokensDelivered
from .contract import Contract, ensure
from .loop import in_loop

SLOW_CALLS = ("sleep", "connect", "getaddrinfo", "fsync", "system", "recv", "accept", "select", "poll")
"""Functions of the interpreter that may take as long as they like."""


class FromTheFuture(Struct, frozen=True, kw_only=True):
    """An event of a kind that nobody knows yet."""

    what: str = "something"


class ObserverContract(Contract):
    """Told of many events, while the lines of Python that it runs are counted.

    Attributes:
        max_lines: lines that one event may cost.
    """

    slot = "observer"
    max_lines: ClassVar[int] = 500

    def test_it_takes_every_kind_of_event(self) -> None:
        def check(events: list[Event]) -> None:
            observer = self.build()
            in_loop(lambda: self._tell(observer, *events))

        self.for_all(st.lists(_events(), max_size=8), check=check)

    def test_it_tolerates_events_it_does_not_know(self) -> None:
        """Later versions have more of them."""
        observer = self.build()
        in_loop(lambda: self._tell(observer, FromTheFuture(), _ended("a"), object(), None))

    def test_it_changes_no_event(self) -> None:
        """Others are told of the same one."""

        def check(event: Event) -> None:
            before = msgspec.json.encode(event)
            in_loop(lambda: self._tell(self.build(), event))
            ensure(msgspec.json.encode(event) == before, f"on must leave the event as it is, found {event}")

        self.for_all(_events(), check=check)

    def test_an_event_costs_little(self) -> None:
        """It runs on the loop, where all requests wait for it. Lines are counted: they are the same each run."""

        def tell() -> None:
            observer, lines = self.build(), _Lines()
            for kind in (
                _ended("a"),
                StepDone(index=1, num_prefill_tokens=1, num_decodes=1, forward_s=0.1, sample_s=0.1),
            ):
                found = lines.during(lambda kind=kind: observer.on(kind))
                ensure(found <= self.max_lines, f"an event must cost at most {self.max_lines} lines, found {found}")
            ensure(not lines.slow, f"on must not call what may wait, found {', '.join(sorted(lines.slow))}")

        in_loop(tell)

    def test_an_event_costs_no_more_after_many(self) -> None:
        def tell() -> None:
            observer, lines = self.build(), _Lines()

            def some(first: int) -> int:
                return lines.during(lambda: [observer.on(_ended(f"r{first + i}")) for i in range(50)])

            early = some(0)
            for number in range(1000):
                observer.on(_ended(f"m{number}"))
            late = some(50)
            ensure(late <= 3 * early + 500, f"50 events cost {early} lines at first, and {late} after a thousand")

        in_loop(tell)

    def _tell(self, observer: Any, *events: object) -> None:
        for event in events:
            try:
                said = observer.on(event)
            except Exception as error:
                ensure(False, f"on must raise nothing, found {type(error).__name__}: {error} for {event}")
            if inspect.iscoroutine(said):
                said.close()
            ensure(said is None, f"on must be a plain function that returns None, found {said!r}")


class _Lines:
    """Counts the lines that run, and notes calls that may wait."""

    def __init__(self) -> None:
        self.number = 0
        self.slow: set[str] = set()

    def during(self, function: Any) -> int:
        """Lines that *function* runs."""
        before, trace, profile = self.number, sys.gettrace(), sys.getprofile()
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            function()
        finally:
            sys.settrace(trace)
            sys.setprofile(profile)
        return self.number - before

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self.number += event == "line"
        return self._trace

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ in SLOW_CALLS:
            self.slow.add(argument.__name__)


def _ended(name: str) -> RequestEnded:
    return RequestEnded(
        id=name,
        num_prompt_tokens=10,
        num_cached_tokens=0,
        num_output_tokens=5,
        finish=("stop",),
        states={"queued": 0.1, "decode": 1.0},
        spans={"compute": 0.5},
        wall_s=1.1,
        ttft_s=0.2,
        status=200,
        endpoint="chat",
        model="tiny",
        tenant=name,
    )


def _events() -> st.SearchStrategy[Event]:
    seconds, counts = st.floats(0, 1e4), st.integers(0, 10_000)
    spans = st.dictionaries(st.sampled_from(["queued", "decode", "something new"]), seconds, max_size=3)
    ended = st.builds(
        RequestEnded,
        id=st.text(max_size=8),
        num_prompt_tokens=counts,
        num_cached_tokens=counts,
        num_output_tokens=counts,
        finish=st.lists(st.sampled_from(["stop", "length", "error"]), max_size=3).map(tuple),
        states=spans,
        spans=spans,
        wall_s=seconds,
        ttft_s=st.none() | seconds,
        status=st.sampled_from([200, 400, 429, 499, 500, 503]),
        error=st.none() | st.text(max_size=10),
        n=st.integers(1, 128),
        max_tokens=st.none() | st.integers(1, 1000),
        endpoint=st.sampled_from(["", "chat", "completion"]),
        model=st.text(max_size=8),
        tenant=st.text(max_size=8),
    )
    delivered = st.builds(TokensDelivered, num_tokens=counts, gaps_s=st.lists(seconds, max_size=4).map(tuple))
    steps = st.builds(
        StepDone, index=counts, num_prefill_tokens=counts, num_decodes=counts, forward_s=seconds, sample_s=seconds
    )
    return st.one_of(ended, delivered, steps)
