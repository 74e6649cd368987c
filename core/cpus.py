"""How many processors this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Processors of the affinity mask, or what the cgroup's quota comes to, rounded up, if that is less.

    Args:
        root: the folder in which `sys` is.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """Processors a cgroup allows, version 2 or 1; None: it sets no limit."""
    try:
        limit, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = root / "sys/fs/cgroup/cpu"
        limit, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None
