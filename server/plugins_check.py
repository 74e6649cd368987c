"""Runs the contract of an installed component through pytest, as its author would."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ..hooks.components import Component
from ..hooks.config import Loaded
from ..hooks.errors import StartError
from .plugins_bench import table
from .plugins_list import find, registry_of

NEEDS: Final = ("pytest", "hypothesis")

TEST: Final = """import json

from headrace.testing import contract


class Test{cls}(contract({slot!r})):
    plugin = {plugin!r}
    name = {name!r}
    options = json.loads({options!r})
{params}
"""


def check(loaded: Loaded, name: str, slot: str | None, options: str = "{}", params: str = "{}") -> int:
    """pytest's exit code: 0 where the component keeps its contract.

    Args:
        options, params: what to build it with and what a request asks, as TOML inline tables.

    Raises:
        StartError: there is no such component, or pytest is not installed.
    """
    component = find(registry_of(loaded), name, slot)
    missing = [module for module in NEEDS if find_spec(module) is None]
    if missing:
        raise StartError(f"checking a plugin needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    with TemporaryDirectory(prefix="headrace-check-") as folder:
        file = Path(folder) / f"test_{component.slot.name}.py"
        file.write_text(_test(component, options, params), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(file)]
        return subprocess.run(command, check=False).returncode


def _test(component: Component, options: str, params: str) -> str:
    asked = table("params", params)
    return TEST.format(
        cls="".join(word.capitalize() for word in component.name.replace(".", "-").split("-") if word),
        slot=component.slot.name,
        plugin=component.plugin.id,
        name=component.name,
        options=json.dumps(table("options", options)),
        params=f"    params = [json.loads({json.dumps(asked)!r})]" if asked else "",
    )
