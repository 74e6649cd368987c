"""The kernels' tests once more, with every access and every operation of the C++ watched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.native.compiled import ROOT, build_hook
from tests.native.compiled import pytestmark as compiled

pytestmark = [compiled, pytest.mark.slow]


def test_nothing_is_read_or_written_out_of_bounds_and_nothing_undefined_is_done(tmp_path):
    hook = build_hook()
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
    library = hook.compile_kernels(ROOT, tmp_path / "watched.so", hook.FLAGS.replace("-O3", "-O1") + " " + flags)
    assert library is not None
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/native"],
        cwd=ROOT,
        env={
            **os.environ,
            "HEADRACE_KERNELS": str(library),
            "LD_PRELOAD": runtime.stdout.strip(),
            # Python itself leaks at its end.
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
