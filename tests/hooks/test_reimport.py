"""Importing strangers' code anew: what has changed, only that, and all of it or nothing."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from headrace.hooks.discovery import GROUP
from headrace.hooks.errors import ConfigError
from headrace.hooks.reimport import Code


class Site:
    """A folder on the path into which distributions are installed, as pip would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, version: str, *, plugin: str, **files: str) -> None:
        """Put the *files* (`package_of_module` is package/module.py) and the metadata of `acme-NAME` there."""
        record = []
        for key, source in files.items():
            path = self.folder / (key.replace("_of_", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, "utf-8")
            record.append(f"{path.relative_to(self.folder)},,\n")
        for old in self.folder.glob(f"acme_{name}-*.dist-info"):
            old.rename(self.folder / f"acme_{name}-{version}.dist-info")
        info = self.folder / f"acme_{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {plugin}\n")
        (info / "RECORD").write_text("".join(record))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    # A compiled file is as old as its source to the second only, and these tests write faster.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith(("acme", "mine", "helper")):
            del sys.modules[name]


def noted() -> Code:
    code = Code()
    code.note()
    return code


def test_what_has_not_changed_keeps_its_modules(site):
    site.install("a", "1.0", plugin="acme_a", acme_a="x = 1")
    module = importlib.import_module("acme_a")
    with noted().renewed() as renewed:
        assert renewed == ()
        assert importlib.import_module("acme_a") is module


def test_an_edited_file_is_imported_anew_and_the_old_module_goes_on(site):
    site.install("a", "1.0", plugin="acme_a", acme_a="x = 1\ndef get(): return x\n")
    old = importlib.import_module("acme_a")
    code = noted()
    site.install("a", "1.0", plugin="acme_a", acme_a="x = 2\n")
    with code.renewed() as renewed:
        assert renewed == ("acme-a 1.0",)
        assert importlib.import_module("acme_a").x == 2
    assert old.get() == 1


def test_a_new_version_is_told_with_the_old_one(site):
    site.install("a", "1.0", plugin="acme_a", acme_a="x = 1")
    importlib.import_module("acme_a")
    code = noted()
    site.install("a", "1.1", plugin="acme_a", acme_a="x = 1")
    with code.renewed() as renewed:
        assert renewed == ("acme-a 1.0 → 1.1",)


def test_a_package_is_imported_anew_with_all_below_it_and_what_else_the_distribution_brought(site):
    files = {"acme_a_of___init__": "", "acme_a_of_plug": "", "acme_a_of_deep": ""}
    site.install("a", "1.0", plugin="acme_a.plug", helper_a="", **files)
    olds = [importlib.import_module(name) for name in ("acme_a", "acme_a.plug", "acme_a.deep", "helper_a")]
    code = noted()
    site.install("a", "1.0", plugin="acme_a.plug", helper_a="y = 1", **files)
    with code.renewed():
        news = [importlib.import_module(old.__name__) for old in olds]
    assert all(new is not old for new, old in zip(news, olds, strict=True))


def test_neighbours_in_a_namespace_are_left_alone(site):
    site.install("a", "1.0", plugin="mine.a", mine_of_a="x = 1")
    site.install("b", "1.0", plugin="mine.b", mine_of_b="x = 1")
    importlib.import_module("mine.a")
    neighbour = importlib.import_module("mine.b")
    code = noted()
    site.install("a", "1.0", plugin="mine.a", mine_of_a="x = 2")
    with code.renewed() as renewed:
        assert renewed == ("acme-a 1.0",)
        assert importlib.import_module("mine.a").x == 2
    assert importlib.import_module("mine.b") is neighbour


def test_what_fails_puts_the_old_modules_back_and_is_tried_again_the_next_time(site):
    site.install("a", "1.0", plugin="acme_a.plug", acme_a_of___init__="", acme_a_of_plug="x = 1")
    old = importlib.import_module("acme_a.plug")
    code = noted()
    site.install("a", "1.0", plugin="acme_a.plug", acme_a_of___init__="", acme_a_of_plug="x = 2")

    def fail() -> None:
        with code.renewed():
            assert importlib.import_module("acme_a.plug").x == 2
            code.note()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert importlib.import_module("acme_a.plug") is old
    assert sys.modules["acme_a"].plug is old
    with code.renewed() as renewed:
        assert renewed == ("acme-a 1.0",)


def test_a_compiled_module_that_has_changed_needs_a_restart_by_name(site):
    site.install("a", "1.0", plugin="acme_a", acme_a="x = 1")
    importlib.import_module("acme_a")
    compiled = sys.modules["acme_a._native"] = type(sys)("acme_a._native")
    library = site.folder / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    library.write_bytes(b"ELF")
    compiled.__file__ = str(library)
    code = noted()
    with code.renewed() as renewed:
        assert renewed == ()
    site.install("a", "1.1", plugin="acme_a", acme_a="x = 1")
    reason = r"acme-a 1.0 → 1.1: needs a restart, for acme_a._native is compiled"
    with pytest.raises(ConfigError, match=reason), code.renewed():
        pass
    assert sys.modules["acme_a._native"] is compiled


def test_headrace_itself_is_never_imported_anew(site):
    assert any(entry.dist.name == "headrace" for entry in entry_points(group=GROUP))
    assert "headrace" not in noted()._installed()


def test_digests_are_of_contents(site):
    site.install("a", "1.0", plugin="acme_a", acme_a="x = 1")
    importlib.import_module("acme_a")
    first = noted().digests(["acme-a 1.0"])
    assert first == noted().digests(["acme-a 1.0"])
    assert list(first) == ["acme-a 1.0"]
    site.install("a", "1.0", plugin="acme_a", acme_a="x = 2")
    assert noted().digests(["acme-a 1.0"]) != first
