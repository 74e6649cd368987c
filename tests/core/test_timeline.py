from __future__ import annotations

import random

from headrace.core.timeline import STATES, Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_states_sum_to_the_wall_time_whatever_happens() -> None:
    clock, rng = Clock(), random.Random(1)
    timeline = Timeline(clock)
    for _ in range(200):
        clock.now += rng.random()
        timeline.enter(rng.choice([state for state in STATES if state != "delivering"]))
    clock.now += 1
    timeline.enter("delivering")
    clock.now += 2
    timeline.end()
    clock.now += 50
    assert abs(sum(timeline.states.values()) - timeline.wall_s) < 1e-9
    assert timeline.states["delivering"] == 2


def test_a_stage_that_hears_late_of_the_end_does_not_go_back() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter("delivering")
    timeline.enter("decode")
    clock.now += 1
    assert timeline.state == "delivering"
    assert timeline.states["decode"] == 0


def test_spans_overlap_the_states_and_marks_keep_the_first_time() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    clock.now += 2
    timeline.mark("first_token")
    clock.now += 2
    timeline.mark("first_token")
    timeline.span("compute", 1.5)
    timeline.span("compute", 1.5)
    report = timeline.report()
    assert (report["ttft_ms"], report["compute_span_ms"], report["wall_ms"]) == (2000, 3000, 4000)
