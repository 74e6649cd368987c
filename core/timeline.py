"""Where a request's time went. It is always in exactly one state, so the states sum to its wall time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

STATES: Final = (
    "template",
    "tokenize",
    "queued",
    "prefill",
    "decode",
    "preempted",
    "parked",
    "delivering",
    "other",
)
"""In the order of a plain request's life; `other` is everything outside the line's hands, such as its channels."""

SPANS: Final = ("compute", "sampling", "detokenize")
"""Work that overlaps the states, and is shown apart from them."""


class Timeline:
    """The states, spans and marks of one request.

    Args:
        clock: seconds, never going back.
    """

    __slots__ = ("_clock", "_entered", "_marks", "_plugins", "_spans", "_state", "_states", "ended", "started")

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self.started = self._entered = clock()
        self.ended: float | None = None
        self._state = "other"
        self._states = dict.fromkeys(STATES, 0.0)
        self._spans = dict.fromkeys(SPANS, 0.0)
        self._marks: dict[str, float] = {}
        self._plugins: dict[str, float] = {}

    @property
    def state(self) -> str:
        return self._state

    def enter(self, state: str) -> None:
        """Leave the present state now. Only the end follows `delivering`: stages hear of it at their own pace."""
        if state == self._state or self._state == "delivering" or self.ended is not None:
            return
        self._leave()
        self._state = state

    def span(self, name: str, seconds: float) -> None:
        self._spans[name] += seconds

    def plugin(self, who: str, seconds: float) -> None:
        """A plugin ran for this request, and for others in the same call."""
        self._plugins[who] = self._plugins.get(who, 0.0) + seconds

    def mark(self, event: str) -> None:
        if event not in self._marks:
            self._marks[event] = self._clock()

    def end(self) -> None:
        """The reader has taken the last delta, or has gone. Idempotent."""
        if self.ended is None:
            self._leave()
            self.ended = self._entered

    @property
    def states(self) -> dict[str, float]:
        """Seconds in each state, up to now."""
        states = dict(self._states)
        if self.ended is None:
            states[self._state] += self._clock() - self._entered
        return states

    @property
    def spans(self) -> dict[str, float]:
        return dict(self._spans)

    @property
    def wall_s(self) -> float:
        return (self._clock() if self.ended is None else self.ended) - self.started

    def since_start(self, event: str) -> float | None:
        """Seconds from the door to the mark *event*; None if it never came."""
        marked = self._marks.get(event)
        return None if marked is None else marked - self.started

    def report(self) -> dict[str, object]:
        """For people: milliseconds, as a response's `timings` and the log line show them."""
        states = self.states
        report: dict[str, object] = {f"{name}_ms": round(1e3 * states[name], 3) for name in STATES}
        report |= {f"{name}_span_ms": round(1e3 * self._spans[name], 3) for name in SPANS}
        first = self.since_start("first_token")
        report["ttft_ms"] = None if first is None else round(1e3 * first, 3)
        report["wall_ms"] = round(1e3 * sum(states.values()), 3)
        if self._plugins:
            report["plugins_ms"] = {who: round(1e3 * seconds, 3) for who, seconds in self._plugins.items()}
        return report

    def _leave(self) -> None:
        now = self._clock()
        self._states[self._state] += now - self._entered
        self._entered = now
