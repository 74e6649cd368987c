"""Files that somebody broke, by accident or on purpose: each is refused with a clear error, or harmless."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["gguf", "safetensors"])
def report(request, tmp_path_factory):
    """What became of some hundreds of broken checkpoints, opened by one process that may use little."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "tests.model.hostile", request.param, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def test_every_broken_file_ends_in_a_model_error_or_in_nothing_wrong(report):
    others = {what: result for what, result in report["results"].items() if result not in ("refused", "loaded")}

    assert others == {}
    assert list(report["results"].values()).count("refused") >= 200


def test_the_files_are_good_before_they_are_broken(report):
    results = report["results"]
    assert {result for what, result in results.items() if what.endswith("whole")} == {"loaded"}


def test_no_broken_file_takes_memory_that_it_has_not(report):
    assert report["grown_kib"] < 64 << 10
