"""What was measured, as JSON for machines and as a Markdown table for people."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec

from .divergence import Summary

RESULTS = Path(__file__).parents[1] / "results"

Found = Mapping[str, Mapping[str, Summary]]
"""What was compared → text → its summary."""


def write(path: Path, found: Found, **about: object) -> None:
    """Write *found* as JSON, with what else is known *about* the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpu": _cpu(), "python": platform.python_version()}
    result = {"machine": machine, **about, "found": msgspec.to_builtins(found)}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def table(found: Found) -> str:
    """A row for each setting, and for each text its mean KL and the share of positions that agree."""
    texts = list(next(iter(found.values())))
    head = " | ".join(f"{text}: KL, p99, top-1" for text in texts)
    rows = [f"| | {head} |", "|---" * (len(texts) + 1) + "|"]
    for name, summaries in found.items():
        cells = " | ".join(_cell(summaries[text]) for text in texts)
        rows.append(f"| {name} | {cells} |")
    return "\n".join(rows)


def _cell(summary: Summary) -> str:
    return f"{summary.mean_kl:.5f}, {summary.p99_kl:.3f}, {100 * summary.top1:.1f} %"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
