"""Server processes, as an operator starts and ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
HEADRACE = (sys.executable, "-m", "headrace")
START_S = 120


def environment(**more: str) -> dict[str, str]:
    """Threads that spin while they wait bring a shared machine to a standstill."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **more}


class Served(NamedTuple):
    """A running `headrace serve`. Its log lies in *log*, a JSON object a line."""

    child: subprocess.Popen[bytes]
    url: str
    log: Path

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text("utf-8").splitlines() if line.startswith("{")]


@contextmanager
def served(folder: Path, *arguments: str, path: Path | None = None) -> Iterator[Served]:
    """`headrace serve` with *arguments* on a free port, from ready to the end of the block.

    Args:
        folder: where it runs.
        path: a folder with further distributions.
    """
    log = folder / "serve.log"
    command = [*HEADRACE, "serve", *arguments, "--port", "0", "--log-format", "json"]
    paths = [str(path)] if path is not None else []
    more = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=folder, env=environment(**more), stderr=out)
    try:
        yield Served(child, _url_when_ready(child, log), log)
    finally:
        end(child)


@contextmanager
def running(command: Sequence[str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the tests' own, with a pipe for what it prints."""
    child = subprocess.Popen(command, cwd=ROOT, env=environment(**more), stdout=subprocess.PIPE)
    try:
        yield child
    finally:
        end(child)
        assert child.stdout is not None
        child.stdout.close()


def end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()


def _url_when_ready(child: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for line in log.read_text("utf-8").splitlines():
            if '"event":"ready"' in line:
                return str(json.loads(line)["url"]).removesuffix("/v1")
        assert child.poll() is None, log.read_text("utf-8")
        time.sleep(0.02)
    raise TimeoutError(log.read_text("utf-8"))
