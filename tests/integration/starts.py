"""Many runs of the command line that share one import of torch, which takes longer than all they do.

`python -m tests.integration.starts FOLDER` reads a list of arguments a line, runs each in a process of its own in
FOLDER, and prints `[exit code, stdout, stderr]` a line. Everything is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import NoReturn

import headrace.core.build
import headrace.server.metrics
import headrace.server.serve  # noqa: F401, imported here and not in each process.
from headrace.hooks.registry import Registry
from headrace.server.cli import main


def run(arguments: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            _become_headrace(arguments)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode()


def _become_headrace(arguments: list[str]) -> NoReturn:
    code: object = 1
    try:
        main(arguments, prog_name="headrace")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    # Taking the interpreter apart, torch and all, would take a second each time.
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    Registry.discover()  # Imports the plugins.
    os.chdir(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
