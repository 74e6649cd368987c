"""The four root folders are one package, however it is installed."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "hooks", "plugins", "server")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def distribution_name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower()


def test_pyproject_ships_each_folder():
    shipped = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert shipped == {folder: f"headrace/{folder}" for folder in FOLDERS}


def test_the_build_hook_links_each_folder():
    tree = ast.parse((ROOT / "hatch_build.py").read_text())
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(values["FOLDERS"]) == FOLDERS


def test_git_ignores_each_link():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    assert [line for line in lines if line.startswith("/src/")] == [f"/src/headrace/{folder}" for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_editable_install_imports_the_root_folder(folder):
    found = find_spec(f"headrace.{folder}")
    assert found is not None
    assert Path(found.origin).resolve() == ROOT / folder / "__init__.py"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_bare_import_is_refused(folder):
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert f"ImportError: import headrace.{folder}, not a bare {folder}" in done.stderr


def test_constraints_pin_each_requirement_once():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [line.partition("==")[0] for line in lines if re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)]
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {distribution_name(row) for row in PROJECT["project"]["dependencies"] + extras["test"] + extras["dev"]}
    assert len(pinned) == len(lines) == len(set(pinned))
    assert wanted - set(pinned) == {"headrace"}


def test_a_wheel_is_python_that_says_its_types():
    assert (ROOT / "src/headrace/py.typed").is_file()


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_holds_every_module(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    modules = {f"headrace/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    modules |= {f"headrace/{name}" for name in ("__init__.py", "__main__.py", "py.typed")}
    assert {name for name in packed if ".dist-info/" not in name and name.endswith((".py", "py.typed"))} == modules
    assert len(packed) == len(set(packed))
