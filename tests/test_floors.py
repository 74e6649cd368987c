"""The floors of docs/design.md, section 2: which folder may import which, read from the source without running it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = ("ingress", "tokenize", "schedule", "forward", "sample", "stream")
# Of the most specific row that holds a module, the names it may import; a floor may always import from itself.
FLOORS = {
    "headrace.hooks": (),
    "headrace.hooks.testing": ("headrace.hooks", "headrace.core"),
    "headrace.core": ("headrace.hooks",),
    "headrace.plugins": ("headrace.hooks", "headrace.core.model", "headrace.core.kernels", "headrace.core.kv"),
    "headrace.server": ("headrace.hooks", "headrace.core.engine", "headrace.core.local"),
}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """The full dotted name of each thing of ours that *source* imports, at the top or inside a function."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
        ):
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        yield from (name for name in names if within(str(name), "headrace"))


def breaches(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The imports of *source* that its floor forbids, each as `module → name`."""
    floor = max((floor for floor in FLOORS if within(module, floor)), key=len)
    allowed = (floor, *FLOORS[floor])
    others = [f"headrace.core.{stage}" for stage in STAGES if module != f"headrace.core.{stage}"]
    is_stage = module.removeprefix("headrace.core.") in STAGES
    return [
        f"{module} → {name}"
        for name in imports(source, module, is_package=is_package)
        if not any(within(name, package) for package in allowed)
        or (floor == "headrace.hooks" and within(name, "headrace.hooks.testing"))
        or (is_stage and any(within(name, other) for other in others))
    ]


def modules(folder: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(["headrace", *parts]).removesuffix(".__init__"), path


@pytest.mark.parametrize("folder", ["hooks", "core", "plugins", "server"])
def test_a_folder_imports_only_what_its_floor_allows(folder):
    found = [
        breach
        for module, path in modules(folder)
        for breach in breaches(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headrace.hooks.slots", "from ..core import engine"),
        ("headrace.hooks.slots", "from .testing import kit"),
        ("headrace.hooks.testing.kit", "import headrace.plugins.greedy"),
        ("headrace.core.engine", "from ..plugins.greedy import Greedy"),
        ("headrace.core.kv.plan", "def late():\n    from ...server import app"),
        ("headrace.core.forward", "from .sample import sample"),
        ("headrace.core.stream", "from . import tokenize"),
        ("headrace.plugins.llama", "from ..core.engine import Engine"),
        ("headrace.plugins.llama", "from headrace import core"),
        ("headrace.server.app", "from ..core.kv import blocks"),
        ("headrace.server.app", "import importlib\nimportlib.import_module('headrace.core.schedule')"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert len(breaches(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headrace.hooks.slots", "import torch\nfrom . import errors\nfrom .params import SamplingParams"),
        ("headrace.hooks.testing.kit", "from ...core.kernels import reference\nfrom .. import messages"),
        ("headrace.core.forward", "from ..hooks.messages import Step\nfrom .channel import Inbox"),
        ("headrace.core.engine", "from . import forward, sample"),
        ("headrace.plugins.llama", "from ..core.model.names import rename\nfrom ..core import kv"),
        ("headrace.server.app", "from ..core import engine\nfrom ..hooks import errors\nfrom .schemas import Chat"),
    ],
)
def test_an_allowed_import_is_let_pass(module, source):
    assert breaches(source, module) == []


def test_a_package_is_the_parent_of_its_own_relative_imports():
    assert list(imports("from .slots import SLOTS", "headrace.hooks", is_package=True)) == [
        "headrace.hooks.slots.SLOTS"
    ]


def test_hooks_load_without_torch():
    names = [module for module, _ in modules("hooks") if not within(module, "headrace.hooks.testing")]
    program = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
