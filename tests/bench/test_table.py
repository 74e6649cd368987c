"""The arithmetic behind the table of benchmarks/."""

from __future__ import annotations

import pytest
from benchmarks.metrics import METRICS, Metric
from benchmarks.table import best, figures, ratio, render, row, verdict

MORE = Metric("rate", "rate", "tok/s", "more", 1.5, 2.0)
LESS = Metric("wait", "wait", "s", "less", 3.0, 4.0)
OWN = Metric("peak", "peak", "MB", "less", 1200, 900, own=True)


def sample(engine: str, setting: str, number: int, **values: float) -> dict[str, object]:
    return {"engine": engine, "setting": setting, "round": number, "figures": values}


def test_a_ratio_is_taken_within_each_round_and_its_lower_bound_is_the_worst_of_three() -> None:
    # The machine was twice as fast in the last round: the ratio must not see it.
    found = ratio({0: 20.0, 1: 30.0, 2: 40.0}, {0: 10.0, 1: 10.0, 2: 20.0}, MORE)
    assert found is not None
    assert found.mean == pytest.approx((2 * 3 * 2) ** (1 / 3))
    assert found.lower == pytest.approx(2)


def test_a_shorter_time_is_a_larger_ratio() -> None:
    found = ratio({0: 2.0}, {0: 8.0}, LESS)
    assert found is not None
    assert found.mean == found.lower == pytest.approx(4)


def test_more_rounds_bring_the_lower_bound_nearer_to_the_mean() -> None:
    ours = {i: 30.0 if i % 4 else 20.0 for i in range(40)}
    found = ratio(ours, dict.fromkeys(ours, 10.0), MORE)
    assert found is not None
    assert 2.0 < found.lower < found.mean < 3.0


def test_rounds_that_only_one_side_has_say_nothing() -> None:
    assert ratio({0: 1.0}, {1: 1.0}, MORE) is None
    found = ratio({0: 1.0, 1: 6.0}, {1: 3.0}, MORE)
    assert found is not None
    assert found.mean == pytest.approx(2)


def test_the_best_peer_is_found_over_all_settings() -> None:
    candidates = {("a", "slow"): {0: 1.0, 1: 2.0}, ("a", "fast"): {0: 3.0}, ("b", "other"): {0: 2.5, 1: 2.5}}
    fastest, shortest = best(candidates, MORE), best(candidates, LESS)
    assert fastest is not None
    assert shortest is not None
    assert (fastest.name, shortest.name) == ("a: fast", "a: slow")


def test_several_figures_of_one_round_are_their_median() -> None:
    samples = [sample("a", "s", 0, rate=value) for value in (1.0, 9.0, 2.0)]
    assert figures(samples, MORE) == {("a", "s"): {0: 2.0}}


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [
        (MORE, 2.0, "goal"),
        (MORE, 1.9, "floor"),
        (MORE, 1.4, "**missed**"),
        (LESS, 4.0, "goal"),  # Of a ratio more is better, whatever was measured.
        (LESS, 2.9, "**missed**"),
        (OWN, 900, "goal"),
        (OWN, 1200, "floor"),
        (OWN, 1201, "**missed**"),
    ],
)
def test_a_figure_is_held_against_floor_and_goal(metric: Metric, value: float, said: str) -> None:
    assert verdict(value, metric) == said


def test_a_row_names_the_best_peer_and_a_figure_that_headrace_lacks_has_no_row() -> None:
    (decode,) = (metric for metric in METRICS if metric.name == "decode_1")
    peers = [sample("x", "q", i, decode_1=100.0, decode_8=1.0) for i in range(3)]
    ours = [sample("headrace", "defaults", i, decode_1=160.0 + i) for i in range(3)]
    cells = row([*peers, *ours], decode)
    assert cells[1:] == ["161 [160, 162] tok/s", "100 [100, 100] tok/s (x: q)", "1.61 (≥ 1.60)", "1.5", "2", "floor"]
    assert row(peers, decode) == []


def test_who_did_not_run_stands_under_the_table() -> None:
    report = {"samples": [sample("x", "q", 0, decode_1=1.0)], "not_run": {"y: fp32": "not installed"}}
    assert render(report).splitlines()[-1] == "Not run: y: fp32 (not installed)"
