"""Each project of plugin_examples/ is installed as a stranger would install it, and its own tests pass.

All of them are installed by one call of pip and tried in one process of pytest, away from this repository's settings.
Those whose libraries are not here are skipped, with the command that would try them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from headrace.hooks.config import load
from headrace.hooks.discovery import GROUP
from headrace.hooks.profiles import GROUP as PROFILES
from headrace.hooks.registry import Registry
from tests.docs.blocks import blocks

EXAMPLES = Path(__file__).parents[2] / "plugin_examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml"))
LIBRARIES = {"jwt-auth": "jwt", "llama-cpp": "llama_cpp", "otel": "opentelemetry", "torchao-int8": "torchao"}
"""Example → what it imports that Headrace does not need."""
NO_SETTING = ("hermes-tools",)
"""Its slot is there, and no setting chooses what fills it yet."""


class Result(NamedTuple):
    """What became of one test."""

    name: str
    failure: str
    skipped: bool


def project(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def need_library(name: str) -> None:
    library = LIBRARIES.get(name, "headrace")
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install ./plugin_examples/{name} && pytest plugin_examples/{name}")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all examples are installed."""
    target = tmp_path_factory.mktemp("examples")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    folders = [str(EXAMPLES / name) for name in NAMES]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), *folders], check=True)
    return target


@pytest.fixture(scope="module")
def results(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    """Example → what became of its tests, run once for all whose libraries are here."""
    here = [name for name in NAMES if find_spec(LIBRARIES.get(name, "headrace")) is not None]
    folder = tmp_path_factory.mktemp("run")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", "utf-8")
    report = folder / "report.xml"
    # Each promise on fewer cases than by default: an example's author tries all of them.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--headrace-examples=10"]
    command += ["--import-mode=importlib", f"--rootdir={EXAMPLES}", f"--junitxml={report}"]
    command += ["-c", str(folder / "pytest.ini")]
    command += [str(EXAMPLES / name / "tests") for name in here]
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")]))
    environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout + done.stderr
    return {name: _results(report, name) for name in here}


def _results(report: Path, name: str) -> list[Result]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.get("classname", "").startswith(f"{name}.tests."):
            broken = case.find("failure") if case.find("failure") is not None else case.find("error")
            failure = "" if broken is None else broken.text or "failed"
            found.append(Result(case.get("name", ""), failure, case.find("skipped") is not None))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_its_own_tests(name: str, request: pytest.FixtureRequest) -> None:
    need_library(name)
    found: list[Result] = request.getfixturevalue("results")[name]
    assert [result.name for result in found if not result.skipped], "no test of it ran"
    failures = [result.failure for result in found if result.failure]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", [name for name in NAMES if GROUP in project(name)["entry-points"]])
def test_an_example_is_loaded_and_fills_a_slot_by_its_entry_point(
    name: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_library(name)
    monkeypatch.syspath_prepend(str(installed))
    distribution = project(name)["name"]
    (found,) = (each for each in distributions(path=[str(installed)]) if each.name == distribution)
    entries = found.entry_points.select(group=GROUP)
    (info,) = Registry.discover(entry_points=entries, allow=[distribution], environ={}).report()
    assert (info.state, info.reason) == ("loaded", "")
    assert info.slots


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_SETTING])
def test_the_toml_of_an_example_s_readme_is_a_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / name))  # A profile is read from its package.
    found = [block for block in blocks(f"../plugin_examples/{name}/README.md") if block.language == "toml"]
    assert found
    profiles = project(name)["entry-points"].get(PROFILES, {})
    entries = [EntryPoint(profile, file, PROFILES) for profile, file in profiles.items()]
    for block in found:
        file = tmp_path / "headrace.toml"
        file.write_text(block.text, "utf-8")
        load(file=file, profile_entry_points=entries)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_one_test_file_and_a_place_in_the_table(name: str) -> None:
    assert f"]({name})" in (EXAMPLES / "README.md").read_text("utf-8")
    assert len(list((EXAMPLES / name / "tests").glob("test_*.py"))) == 1
