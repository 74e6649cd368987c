"""The harness of benchmarks/: servers are started and ended, tools are read, who fails is named."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks import inprocess_llamacpp, peers
from benchmarks.peers import INPROCESS, Subject
from benchmarks.prompts import Prompts
from benchmarks.run import Rounds
from benchmarks.server import Server

WEB = (sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1")


def tool(folder: Path, name: str, output: str) -> None:
    """A program that says *output* and notes how it was called."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/{name}.calls\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)


def test_a_server_runs_inside_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    with Server(WEB, env={}, ready_path="/") as server:
        assert server.ready_s > 0
        assert server.peak_rss_mb() > 1
        process = server._process
        server.hold()
    assert process.returncode is not None


def test_a_server_that_ends_by_itself_is_told_with_its_last_words() -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such model')")
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1.*no such model"), Server(command, env={}, ready_path="/"):
        pass


def test_figures_of_llamacpps_tools_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool(tmp_path, "llama-bench", json.dumps([{"n_prompt": 512, "avg_ts": 547.5}]))
    line = {"n_kv_max": 2048, "pl": 8, "speed_pp": 500.0, "speed_tg": 267.5}
    tool(tmp_path, "llama-batched-bench", f"warm up\n{json.dumps(line)}\n")
    inprocess_llamacpp.main([str(tmp_path), "m.gguf", "--threads", "2", "--batches", "8"])
    assert json.loads(capsys.readouterr().out) == {"prefill_512": 547.5, "decode_8": 267.5}
    calls = (tmp_path / "llama-batched-bench.calls").read_text()
    assert "-c 2048" in calls
    assert "-npl 8" in calls


def test_who_is_not_installed_and_who_fails_are_named_and_others_go_on(tmp_path: Path) -> None:
    fails = Subject("a", "broken", (sys.executable, "-c", f"open('{tmp_path}/gone/file')"), (INPROCESS,), tmp_path)
    works = Subject("b", "fine", (sys.executable, "-c", "print('{\"decode_1\": 2.5}')"), (INPROCESS,), tmp_path)
    with ExitStack() as kept:
        rounds = Rounds(kept, 1.0)
        for subject in (fails, works, fails._replace(engine="c", needs=tmp_path / "missing")):
            rounds.turn(subject, 0)
    assert [sample["figures"] for sample in rounds.samples] == [{"decode_1": 2.5}]
    assert rounds.failed["c: broken"] == "not installed"
    assert "No such file" in rounds.failed["a: broken"]
    assert str(tmp_path) not in rounds.failed["a: broken"]


def test_a_prompt_has_the_length_that_was_asked_for_whatever_the_template_adds() -> None:
    prompts = Prompts("m", {"ignore_eos": None, "seed": 7})
    prompts.template_tokens = 20
    body = prompts.body(128, 4, system="a b c", temperature=0.8)
    words = sum(len(message["content"].split()) for message in body["messages"])
    assert words == 108
    assert (body["temperature"], body["seed"]) == (0.8, 7)
    assert "ignore_eos" not in body
    assert prompts.body(128, 4)["messages"] != prompts.body(128, 4)["messages"]


def test_every_subject_has_a_name_of_its_own() -> None:
    folder = Path(os.devnull)
    for subjects in (list(peers.sweep(folder)), [*peers.headrace("m", []), *peers.chosen(folder)]):
        names = [subject.name for subject in subjects]
        assert len(set(names)) == len(names)
