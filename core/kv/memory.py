"""How much memory this process may still use. The one place here that looks at the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ...hooks.errors import MemoryPlanError


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process can still use without swapping or being killed.

    On Linux: MemAvailable of /proc/meminfo, or what the process's cgroups (version 2 or 1, each up to the root) have
    left below their limits, if that is less. Elsewhere: free physical pages, or all of them where nothing better is
    known.

    Args:
        root: the folder in which `proc` and `sys` are.

    Raises:
        MemoryPlanError: this system does not say.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except OSError:
        return _available_pages()
    fields = _fields(meminfo.replace(":", " "))
    if "MemAvailable" not in fields:
        raise MemoryPlanError("/proc/meminfo must have a MemAvailable line (Linux 3.14 and later), and has none")
    return min([fields["MemAvailable"] * 1024, *_cgroup_rooms(root)])


def _available_pages() -> int:
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if name in getattr(os, "sysconf_names", {}):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    raise MemoryPlanError("this system does not say how much memory is available")


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """For each cgroup with a memory limit that this process is in: what may still be used. Never negative."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, of which only the root is mounted: missing folders say nothing.
        relative = PurePosixPath(path.lstrip("/"))
        for folder in (mount / relative, *(mount / parent for parent in relative.parents)):
            yield from _cgroup_room(folder, *names)


def _cgroup_room(folder: Path, limit_file: str, usage_file: str, cache_field: str) -> Iterator[int]:
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        # Files that were read and are not in use count as usage, but are dropped before anything is killed.
        cache = _fields((folder / "memory.stat").read_text()).get(cache_field, 0)
    except OSError:
        return
    if limit != "max":
        yield max(0, int(limit) - max(0, usage - cache))


def _fields(text: str) -> dict[str, int]:
    """Lines of `name number …`."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
