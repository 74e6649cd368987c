"""An example is installed as a stranger would install it, and chosen by name. tests/integration has the others."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from headrace.hooks.decode import Use
from headrace.hooks.protocols import Context, SamplingContext
from headrace.hooks.registry import Registry

EXAMPLES = Path(__file__).parents[2] / "plugin_examples"


def install(name: str, target: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(EXAMPLES / name)]
    subprocess.run(command, check=True, capture_output=True)


def test_top_a_is_found_by_its_entry_point_and_built_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("top-a", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (installed,) = distributions(path=[str(tmp_path)])
    registry = Registry.discover(entry_points=installed.entry_points, environ={})
    context = Context(sampling=SamplingContext(vocab_size=10, num_slots=2))
    bound = registry.build("logits_processor", Use(use="top-a"), context)
    assert (bound.plugin, bound.component.phase) == ("top-a", "truncate")
