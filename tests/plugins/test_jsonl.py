"""The observer jsonl: what it writes, what it drops, and how large its files grow."""

import json
import threading

import pytest

from headrace.hooks.errors import ConfigError
from headrace.hooks.protocols import RequestEnded, StepDone
from headrace.plugins.jsonl import Writer
from tests.plugins.rig import build


def ended(id):
    return RequestEnded(
        id=id,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=5,
        finish=("stop",),
        states={"decode": 0.5},
        spans={},
        wall_s=0.5,
        ttft_s=None,
        status=200,
        endpoint="chat",
        model="tiny",
        tenant="app",
    )


STEP = StepDone(index=1, num_prefill_tokens=0, num_decodes=2, forward_s=0.1, sample_s=0.01)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ends_of_requests_are_written_and_steps_only_where_asked_for(tmp_path):
    for name, events, expected in (
        ("one", ["request"], ["request"]),
        ("two", ["request", "step"], ["step", "request"]),
    ):
        observer = build("observer", "jsonl", path=str(tmp_path / name), events=events).component
        for event in (STEP, ended("r-1"), object()):
            observer.on(event)
        observer.close()
        observer.close()
        written = lines(tmp_path / name)
        assert [line["event"] for line in written] == expected
        assert (written[-1]["id"], written[-1]["states"], written[-1]["ttft_s"]) == ("r-1", {"decode": 0.5}, None)
        assert [written[-1][name] for name in ("endpoint", "model", "tenant")] == ["chat", "tiny", "app"]
        assert "dropped" not in written[-1]


def test_a_file_is_continued_after_a_restart(tmp_path):
    for id in ("first", "second"):
        observer = build("observer", "jsonl", path=str(tmp_path / "log")).component
        observer.on(ended(id))
        observer.close()
    assert [line["id"] for line in lines(tmp_path / "log")] == ["first", "second"]


def test_the_files_stay_within_their_bound(tmp_path):
    path = tmp_path / "log"
    observer = build("observer", "jsonl", path=str(path), max_bytes=2000).component
    for number in range(100):
        observer.on(ended(f"r-{number}"))
    observer.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "log.1"]
    assert all(0 < each.stat().st_size <= 2000 for each in tmp_path.iterdir())
    ids = [line["id"] for each in ("log.1", "log") for line in lines(tmp_path / each)]
    assert ids == [f"r-{number}" for number in range(100 - len(ids), 100)]


def test_a_disk_that_hangs_costs_events_and_never_the_line(tmp_path, monkeypatch):
    started, go_on, worked_off = threading.Event(), threading.Event(), threading.Event()
    write = Writer._write

    def hanging(self, line):
        started.set()
        assert go_on.wait(30)
        write(self, line)
        if b'"r-1"' in line:
            worked_off.set()

    monkeypatch.setattr(Writer, "_write", hanging)
    observer = build("observer", "jsonl", path=str(tmp_path / "log"), max_queue=2).component
    observer.on(ended("held"))
    assert started.wait(30)
    for number in range(5):
        observer.on(ended(f"r-{number}"))
    assert observer.num_dropped == 3
    go_on.set()
    assert worked_off.wait(30)
    observer.on(ended("after"))
    observer.close()
    written = lines(tmp_path / "log")
    assert [line["id"] for line in written] == ["held", "r-0", "r-1", "after"]
    assert written[-1]["dropped"] == 3


def test_a_disk_that_is_full_costs_lines_and_not_the_writer(tmp_path, monkeypatch):
    write = Writer._write

    def full(self, line):
        if b'"lost"' in line:
            raise OSError(28, "No space left on device")
        write(self, line)

    monkeypatch.setattr(Writer, "_write", full)
    observer = build("observer", "jsonl", path=str(tmp_path / "log")).component
    for id in ("first", "lost", "second"):
        observer.on(ended(id))
    observer.close()
    assert [line["id"] for line in lines(tmp_path / "log")] == ["first", "second"]


def test_a_path_that_cannot_be_written_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match="path must be a file that can be written"):
        build("observer", "jsonl", path=str(tmp_path / "none" / "log"))
