"""`headrace plugins new` writes projects that install and keep their contracts, for every slot."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.hooks.errors import StartError
from headrace.hooks.registry import Registry
from headrace.hooks.slots import SLOTS
from headrace.server.cli import main
from headrace.server.plugins_new import files, write

INSTALLED = ("sampler",)
"""Slots whose projects are really installed in the quick tests; all of them are in the slow ones."""
SECONDS = 300


def name_of(slot: str) -> str:
    return f"my-{slot.replace('_', '-')}"


@pytest.mark.parametrize("slot", SLOTS)
def test_every_slot_has_a_project(slot: str) -> None:
    written = files("some-thing", slot)
    project = tomllib.loads(written["pyproject.toml"])
    assert project["project"]["entry-points"]["headrace.plugins"] == {"some-thing": "headrace_some_thing"}
    assert len(list(filter(None, written["pyproject.toml"].splitlines()))) <= 10
    assert set(written) == {
        "pyproject.toml",
        "README.md",
        "headrace_some_thing.py",
        "tests/test_headrace_some_thing.py",
    }
    assert "$" not in written["README.md"].replace('"^[0-9a-f]{64}$"', "")
    assert ast.get_docstring(ast.parse(written["headrace_some_thing.py"]))


@pytest.mark.parametrize("slot", SLOTS)
def test_what_is_written_registers_a_component_for_its_slot(
    slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write("some-thing", slot, tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "headrace_some_thing", raising=False)
    module = __import__("headrace_some_thing")
    registry = Registry()
    registry.add(module, "some-thing")
    assert [each.name for each in registry.offered(slot)] == ["some-thing"]
    monkeypatch.delitem(sys.modules, "headrace_some_thing")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(StartError, match="must be new or empty"):
        write("mine", "stop", tmp_path)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


@pytest.mark.parametrize("name", ["Mine", "my_plugin", "../x", "3d", "a--b", ""])
def test_a_name_that_cannot_be_a_projects_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="a name must be of lower-case letters"):
        write(name, "stop", tmp_path)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="headrace already brings a plugin called fcfs"):
        write("fcfs", "scheduler_policy", tmp_path)


def installed(slot: str, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The project of *slot*, written by the command and installed into a folder, and an environment that has it."""
    written = CliRunner().invoke(main, ["plugins", "new", name_of(slot), "--slot", slot, "--into", str(tmp_path)])
    assert written.exit_code == 0, written.output
    project, target = tmp_path / name_of(slot), tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(project)]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    return project, {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


def check_contract(slot: str, tmp_path: Path) -> None:
    project, environ = installed(slot, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(
        command, cwd=project, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("slot", INSTALLED)
def test_a_project_installs_and_passes_its_contract(slot: str, tmp_path: Path) -> None:
    check_contract(slot, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("slot", [slot for slot in SLOTS if slot not in INSTALLED])
def test_the_project_of_every_other_slot_does_so_too(slot: str, tmp_path: Path) -> None:
    check_contract(slot, tmp_path)


def test_an_installed_project_is_listed_and_checked_by_its_name(tmp_path: Path) -> None:
    _, environ = installed("stop", tmp_path)
    headrace = [sys.executable, "-m", "headrace", "plugins"]
    run = {"env": environ, "capture_output": True, "text": True, "check": False, "timeout": SECONDS, "cwd": tmp_path}
    listed = subprocess.run([*headrace, "list"], **run)  # type: ignore[call-overload]
    assert any(line.startswith("my-stop ") and "stop: my-stop" in line for line in listed.stdout.splitlines())
    checked = subprocess.run([*headrace, "check", "my-stop", "--params", "{ max_lines = 2 }"], **run)  # type: ignore[call-overload]
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert " passed" in checked.stdout
