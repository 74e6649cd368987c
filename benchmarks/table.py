"""From raw figures to the table: each figure of Headrace against the best peer in its best setting.

    python -m benchmarks.table results/2026-11-29-main.json

A ratio is larger where Headrace is better, whatever the unit. It is taken within each round, where both had the same
machine. The ratio of a run is the geometric mean of its rounds; its lower bound is the 2.5 % quantile of that mean over
resampled rounds, which with three rounds is the worst of them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from .metrics import METRICS, SELF, Metric

RESAMPLES = 4000
LOWER = 0.025

Rounds = dict[int, float]
"""Round → figure."""


class Best(NamedTuple):
    """A setting and its figures."""

    name: str
    rounds: Rounds


class Ratio(NamedTuple):
    """How many times better, and at least."""

    mean: float
    lower: float


def figures(samples: Iterable[Mapping[str, Any]], metric: Metric) -> dict[tuple[str, str], Rounds]:
    """(engine, setting) → its figures; several of one round are their median."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for sample in samples:
        if metric.name in sample["figures"]:
            rounds = found.setdefault((sample["engine"], sample["setting"]), {})
            rounds.setdefault(sample["round"], []).append(sample["figures"][metric.name])
    return {who: {number: median(values) for number, values in rounds.items()} for who, rounds in found.items()}


def best(candidates: Mapping[tuple[str, str], Rounds], metric: Metric) -> Best | None:
    """The candidate with the best mean over its rounds."""
    if not candidates:
        return None
    sign = 1 if metric.better == "more" else -1
    who = max(candidates, key=lambda name: sign * geometric_mean(candidates[name].values()))
    return Best(": ".join(who), candidates[who])


def ratio(ours: Rounds, theirs: Rounds, metric: Metric) -> Ratio | None:
    """How many times better *ours* is, over the rounds that both had; None where there is none."""
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    each = [ours[i] / theirs[i] if metric.better == "more" else theirs[i] / ours[i] for i in shared]
    draw = random.Random(0)
    means = sorted(geometric_mean(draw.choices(each, k=len(each))) for _ in range(RESAMPLES))
    return Ratio(geometric_mean(each), means[int(LOWER * RESAMPLES)])


def worst(rounds: Rounds, metric: Metric) -> float:
    return min(rounds.values()) if metric.better == "more" else max(rounds.values())


def verdict(value: float, metric: Metric) -> str:
    """Where *value* stands: past the goal, past the floor, or short of it."""
    if metric.floor is None or metric.goal is None:
        return ""
    sign = -1 if metric.own and metric.better == "less" else 1
    if sign * value >= sign * metric.goal:
        return "goal"
    return "floor" if sign * value >= sign * metric.floor else "**missed**"


def row(samples: Sequence[Mapping[str, Any]], metric: Metric) -> list[str]:
    """The cells of one metric; empty where Headrace has no figure."""
    found = figures(samples, metric)
    ours = best({who: rounds for who, rounds in found.items() if who[0] == SELF}, metric)
    peer = best({who: rounds for who, rounds in found.items() if who[0] != SELF}, metric)
    if ours is None:
        return []
    cells = [metric.label, _cell(ours.rounds, metric), "", "", "", "", ""]
    if peer is not None:
        cells[2] = f"{_cell(peer.rounds, metric)} ({peer.name})"
    if metric.floor is not None and metric.goal is not None:
        cells[4], cells[5] = f"{metric.floor:g}", f"{metric.goal:g}"
    if metric.own:
        cells[6] = verdict(worst(ours.rounds, metric), metric)
    elif peer is not None and (found_ratio := ratio(ours.rounds, peer.rounds, metric)) is not None:
        cells[3] = f"{found_ratio.mean:.2f} (≥ {found_ratio.lower:.2f})"
        cells[6] = verdict(found_ratio.lower, metric)
    return cells


def settings(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Each metric's peers in all their settings, the best first: what a sweep is for."""
    lines = []
    for metric in METRICS:
        found = figures(samples, metric)
        sign = -1 if metric.better == "more" else 1
        for who in sorted(found, key=lambda name: sign * geometric_mean(found[name].values())):
            lines.append([metric.label, _cell(found[who], metric), ": ".join(who)])
    return lines


def render(report: Mapping[str, Any]) -> str:
    """Markdown: the table where Headrace was measured, else all settings; and who did not run."""
    samples = report["samples"]
    rows = [cells for metric in METRICS if (cells := row(samples, metric))]
    if rows:
        text = _table(["", "Headrace", "best peer", "ratio (at least)", "floor", "goal", "reached"], rows)
    else:
        text = _table(["", "median [range]", "engine: setting"], settings(samples))
    for name, reason in report["not_run"].items():
        text += f"\nNot run: {name} ({reason.strip().splitlines()[-1]})"
    return text


def _cell(rounds: Rounds, metric: Metric) -> str:
    values = sorted(rounds.values())
    spread = "" if len(values) == 1 else f" [{values[0]:.3g}, {values[-1]:.3g}]"
    return f"{median(values):.3g}{spread} {metric.unit}".rstrip()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--settings", action="store_true", help="every setting of everybody instead")
    args = parser.parse_args()
    report = json.loads(args.results.read_text())
    head = ["", "median [range]", "engine: setting"]
    print(_table(head, settings(report["samples"])) if args.settings else render(report))


if __name__ == "__main__":
    main()
