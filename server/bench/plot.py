"""A run as a picture: each request over time, the latencies' distributions, and the rate of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .record import Record
from .report import Report, Spread

WAIT, STREAM, FAILED = "#c9d3e0", "#2f6db3", "#c23b3b"
MAX_BARS: Final = 400
BARS_POINTS: Final = 200
"""Height that all bars share, in points."""
NUM_BINS: Final = 60


def plot(path: Path, report: Report, records: list[Record]) -> None:
    """Write a PNG to *path*."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    grid = figure.subplots(2, 2)
    load = report.load
    pace = f"{load.rate:g} requests/s" if load.rate is not None else f"{load.concurrency} at a time"
    figure.suptitle(
        f"{report.model}: {report.num_complete} of {report.num_sent} requests, {pace}, "
        f"{report.output_tokens_per_s:.1f} output tokens/s"
    )
    complete = [record for record in records if record.error is None]
    _requests(grid[0, 0], records)
    _shares(grid[0, 1], report, complete)
    _gaps(grid[1, 0], report.itl_ms, complete)
    _rate(grid[1, 1], report, complete)
    figure.savefig(path, format="png", dpi=110)


def _requests(axes: Axes, records: list[Record]) -> None:
    shown = sorted(records, key=lambda record: record.sent_s)[:MAX_BARS]
    parts: dict[str, list[tuple[int, float, float]]] = {WAIT: [], STREAM: [], FAILED: []}
    for row, record in enumerate(shown):
        first_s = record.times[0] if record.times else record.end_s
        parts[WAIT].append((row, record.sent_s, first_s))
        parts[STREAM if record.error is None else FAILED].append((row, first_s, record.end_s))
        if not record.times:  # Nothing of it is streaming, and its failure is to be seen.
            parts[FAILED].append(parts[WAIT].pop())
    width = max(1.0, min(12.0, BARS_POINTS / max(1, len(shown))))
    labels = {WAIT: "until its first token", STREAM: "streaming", FAILED: "failed"}
    for colour, bars in parts.items():
        if bars:
            rows, begins, ends = zip(*bars, strict=True)
            axes.hlines(rows, begins, ends, colors=colour, linewidths=width, label=labels[colour])
    left_out = f" (the first {MAX_BARS})" if len(records) > MAX_BARS else ""
    axes.set(title=f"Requests{left_out}", xlabel="seconds", ylabel="in the order of sending", xlim=(0, None))
    axes.set_ylim(max(len(shown), 8) - 0.5, -0.5)
    axes.legend(loc="lower left", fontsize="small")


def _shares(axes: Axes, report: Report, complete: list[Record]) -> None:
    """What share of requests had their first token, and their end, within a time."""
    targets = report.load.targets
    for label, colour, values, target_ms in (
        ("first token", STREAM, [record.ttft_s for record in complete], targets.ttft_ms),
        ("end", "#d98a29", [record.e2e_s for record in complete], targets.e2e_ms),
    ):
        ordered = sorted(value for value in values if value is not None)
        axes.step([0.0, *ordered], numpy.linspace(0, 1, len(ordered) + 1), where="post", color=colour, label=label)
        if target_ms is not None:
            axes.axvline(target_ms / 1000, color=colour, linestyle=":", label=f"target of the {label}")
    axes.set(title="Share of requests within a time", xlabel="seconds since sending", ylabel="share", ylim=(0, 1.02))
    axes.legend(loc="lower right", fontsize="small")
    axes.grid(alpha=0.3)


def _gaps(axes: Axes, spread: Spread | None, complete: list[Record]) -> None:
    gaps_ms = [gap * 1000 for record in complete for gap in record.gaps_s]
    axes.set(title="Time between events of a stream", xlabel="milliseconds", ylabel="how often", yscale="log")
    if not gaps_ms or spread is None:
        return
    axes.hist(gaps_ms, bins=NUM_BINS, range=(0, max(gaps_ms) or 1), color=STREAM)
    for name, value, style in (("p50", spread.p50, "-"), ("p90", spread.p90, "--"), ("p99", spread.p99, ":")):
        axes.axvline(value, color="black", linestyle=style, linewidth=1, label=f"{name} {value:.1f} ms")
    axes.legend(loc="upper right", fontsize="small")


def _rate(axes: Axes, report: Report, complete: list[Record]) -> None:
    """Tokens a second over time; those of a request are spread evenly over its events."""
    times = [at for record in complete for at in record.times]
    weights = [record.num_output_tokens / len(record.times) for record in complete for _ in record.times]
    axes.set(title="Output", xlabel="seconds", ylabel="tokens/s")
    if not times:
        return
    # Bins of a few events each, or the rate would be noise.
    num_bins = max(1, min(NUM_BINS, len(times) // 8))
    counts, edges = numpy.histogram(times, bins=num_bins, range=(0, max(times) or 1), weights=weights)
    axes.stairs(counts / numpy.diff(edges), edges, fill=True, color=STREAM, alpha=0.6)
    mean = report.output_tokens_per_s
    axes.axhline(mean, color="black", linewidth=1, label=f"mean {mean:.1f}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize="small")
    axes.grid(alpha=0.3)
