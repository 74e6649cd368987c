"""The tutorial, done word for word by a stranger who starts in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.docs.blocks import blocks
from tests.integration.processes import HEADRACE, environment, served
from tests.integration.tiny import write_tiny

PAGE = "plugins/tutorial.md"
SECONDS = 300
PIP = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target"]
COST = 'headrace_plugin_seconds_total{plugin="p-less",slot="logits_processor"}'


class Stranger:
    """Somebody with a folder, and a path of their own in place of an environment."""

    def __init__(self, home: Path) -> None:
        self.home = self.folder = home
        self.site = home / "site"

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(PYTHONPATH=str(self.site)),
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def type(self, line: str) -> str:
        """What a line of the shell does, here."""
        words = line.split()
        match words:
            case ["cd", folder]:
                self.folder = self.home / folder
                return ""
            case ["pip", "install", "-e", "."]:
                return self.run(sys.executable, "-m", "pip", "install", *PIP, str(self.site), ".")
            case ["pytest"]:
                return self.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
            case ["headrace", "plugins", "bench", name]:
                return self.run(*HEADRACE, "plugins", "bench", name, "--seconds", "0")
            case ["headrace", *rest]:
                return self.run(*HEADRACE, *rest)
        raise AssertionError(f"the tutorial has a line that its test cannot do: {line}")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """One who has done everything up to the last command, which serves."""
    stranger = Stranger(tmp_path_factory.mktemp("stranger"))
    said = ""
    for block in blocks(PAGE):
        if block.path:
            file = stranger.home / block.path
            assert file.suffix in (".py", ".toml")
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            for line in block.text.splitlines():
                if line == "headrace serve":
                    return stranger
                if line == "headrace config check":
                    stranger.folder = stranger.home
                said += stranger.type(line)
    raise AssertionError("the tutorial must end with `headrace serve`")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny")


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_strangers_ten_lines(stranger: Stranger, model: Path) -> None:
    (block,) = [block for block in blocks(PAGE) if block.path == "ask.py"]
    with served(stranger.home, str(model), path=stranger.site) as server:
        asking = block.text.replace("http://127.0.0.1:8000", server.url)
        assert asking != block.text
        stranger.run(sys.executable, "-c", asking)
        assert metric(server.url, COST) > 0
        wrong = {"prompt": "x", "max_tokens": 1, "headrace": {"logits": {"p-less": {"scale": 2}}}}
        refused = httpx.post(f"{server.url}/v1/completions", json=wrong, trust_env=False, timeout=30)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "headrace.logits.p-less.scale"


def test_it_is_listed_and_in_the_order_of_the_chain(stranger: Stranger) -> None:
    listed = stranger.run(*HEADRACE, "plugins", "list")
    (line,) = [line for line in listed.splitlines() if line.startswith("p-less ")]
    assert line.split()[1:4] == ["selected", "headrace-p-less", "0.1"]
    (truncate,) = [line for line in listed.splitlines() if line.startswith("  truncate")]
    assert truncate.endswith(" → p-less")


def test_uninstalled_it_is_gone(stranger: Stranger, tmp_path: Path) -> None:
    gone = Stranger(stranger.home)
    gone.site = tmp_path / "nothing"
    listed = gone.run(*HEADRACE, "plugins", "list")
    assert "headrace-p-less" not in listed
    assert "no logits processor called 'p-less'" in listed
