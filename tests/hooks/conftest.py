"""Distributions that exist only on a temporary path: real metadata, real modules, found by the real scan."""

import sys
from importlib import metadata
from textwrap import dedent

import pytest


class Site:
    """A folder like site-packages."""

    def __init__(self, path):
        self.path = path

    def install(self, distribution, version="1.0", *, group="headrace.plugins", points=None, **modules):
        """Add a distribution whose entry points are *points*, by default one a module, named like it."""
        for name, source in modules.items():
            (self.path / f"{name}.py").write_text("from headrace.hooks.registry import plugin\n" + dedent(source))
        folder = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in (points or {name: name for name in modules}).items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))

    def entry_points(self, group="headrace.plugins"):
        found = metadata.distributions(path=[str(self.path)])
        return [entry for each in found for entry in each.entry_points if entry.group == group]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty site, importable until the test ends."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
