"""Writes the project of a new plugin: metadata, README, one module, one test with the contract of its slot.

The modules are in scaffold/, one a slot, each a small component that works; a name goes in where they have `$name`.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Final

from ..hooks.choices import keys
from ..hooks.discovery import GROUP
from ..hooks.errors import StartError
from ..hooks.slots import SLOTS

SCAFFOLD: Final = Path(__file__).parent / "scaffold"
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

PYPROJECT: Final = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "headrace-$name"
version = "0.1"
dependencies = ["headrace>=0.1"]

[project.entry-points."headrace.plugins"]
$name = "$module"
"""

TEST: Final = '''"""The contract of the slot `$slot`, and below it what $name promises besides."""

from headrace.testing import $contract


class Test$cls($contract):
    plugin = "$module"
    name = "$name"
'''

README: Final = """# $name

$doc

```sh
pip install -e .
headrace plugins list      # it is there, and does nothing yet
```

$choose

[$module.py]($module.py) is the whole of it. What a component of the slot `$slot` must do, on which thread and
within which time is in Headrace's docs/plugins/slots.md. `pip install pytest hypothesis && pytest` runs the contract
that says so.
"""

_CHOSEN_BY: Final = {
    "model_source": "A model names it: `headrace serve $name:PATH`.",
    "weight_loader": "A model source names it, as the `kind` of what it found.",
    "architecture": "A checkpoint names it; `--architecture $name` does so for any other.",
}
_REQUIRED: Final = {"auth": '{ use = "$name", options = { digest = "SHA-256 of the secret" } }'}
_OPT_IN: Final = """[plugins]
allow = ["headrace-$name"]
"""


def write(name: str, slot: str, into: Path) -> Path:
    """Write the project *name* as a folder of that name below *into*.

    Returns:
        The folder.

    Raises:
        StartError: the name will not do, or there is something already.
    """
    _check_name(name)
    folder = into / name
    if folder.exists() and any(folder.iterdir()):
        raise StartError(f"{folder} must be new or empty; choose another name, or another folder with --into")
    for path, text in files(name, slot).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def files(name: str, slot: str) -> dict[str, str]:
    """Path → text of each file of the project."""
    module = f"headrace_{name.replace('-', '_')}"
    words = {
        "name": name,
        "slot": slot,
        "module": module,
        "cls": "".join(word.capitalize() for word in name.split("-")),
        "contract": "".join(word.capitalize() for word in slot.split("_")) + "Contract",
    }
    source = _fill((SCAFFOLD / f"{slot}.py.txt").read_text(encoding="utf-8"), words)
    extra = SCAFFOLD / f"{slot}.test.txt"
    test = TEST + extra.read_text(encoding="utf-8") if extra.exists() else TEST
    words["doc"] = source.split('"""')[1].split("\n\n")[0].partition(": ")[2].replace("\n", " ")
    words["doc"] = words["doc"][:1].upper() + words["doc"][1:]
    words["choose"] = _fill(_choose(slot), words)
    return {
        "pyproject.toml": _fill(PYPROJECT, words),
        "README.md": _fill(README, words),
        f"{module}.py": source,
        f"tests/test_{module}.py": _fill(test, words),
    }


def _choose(slot: str) -> str:
    """How the configuration chooses a component of *slot*."""
    if slot in _CHOSEN_BY:
        return _CHOSEN_BY[slot]
    found = [key for key, each in keys().items() if each == slot and key != "sampling.phases"]
    text = _OPT_IN if SLOTS[slot].opt_in else ""
    if found:
        section, _, word = found[0].rpartition(".")
        value = _REQUIRED.get(slot) or ('"$name"' if _is_one(found[0]) else '["$name"]')
        chosen = f"[{section}]\n{word} = {value}\n" if section else f"{word} = {value}\n"
        # A key without a section must stand before all sections.
        text = chosen + ("\n" + text if text else "") if not section else "\n".join(filter(None, (text, chosen)))
    if not text:
        return "Nothing in this Headrace asks for the slot yet; the contract does."
    return f"What uses it, in `headrace.toml`:\n\n```toml\n{text}```"


def _is_one(key: str) -> bool:
    from ..hooks.config_text import settings

    return not isinstance(next(setting.default for setting in settings() if setting.key == key), tuple)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise StartError(f"a name must be of lower-case letters and digits, with single hyphens between, got {name!r}")
    for entry in metadata.entry_points(group=GROUP):
        if entry.name == name:
            owner = entry.dist.name if entry.dist else entry.value
            raise StartError(f"{owner} already brings a plugin called {name}; choose another name")


def _fill(text: str, words: dict[str, str]) -> str:
    return Template(text).substitute(words)
