"""The code of strangers in this process: which modules are whose, whether their files have changed, and importing anew.

What is built stays as it was: objects keep the module that made them alive, so two versions of a plugin live side by
side. Only the table of modules is changed here, and only of distributions of which something has changed.

It knows the modules of a distribution by its files, and by the packages its entry points name. A module that two
distributions share is imported anew for both. Compiled modules cannot be: Python loads each once a process.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from .discovery import GROUP, normal
from .errors import ConfigError
from .slots import PROJECT

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

_COMPILED: Final = tuple(importlib.machinery.EXTENSION_SUFFIXES)


class Loaded(Struct, frozen=True, kw_only=True):
    """What is imported of one distribution.

    Attributes:
        origin: `name version`.
        files: module → digest of its file.
    """

    origin: str
    files: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Of all its modules; equal on any machine."""
        return sha256(repr(sorted(self.files.items())).encode()).hexdigest()[:16]


class Code:
    """The modules of plugins that did not come with Headrace, as they were when they were imported.

    Args:
        entry_points: what is installed; None: look each time.
    """

    def __init__(self, entry_points: Sequence[EntryPoint] | None = None) -> None:
        self._entry_points = entry_points
        self._known: dict[str, Loaded] = {}
        self._noted_at = 0.0

    def note(self) -> None:
        """What is imported now is what it will be compared with."""
        self._known = {name: _loaded(entries) for name, entries in self._installed().items()}
        self._noted_at = time.time()

    def digests(self, origins: Sequence[str]) -> dict[str, str]:
        """`name version` → digest of its code, of those of *origins* that are known."""
        return {each.origin: each.digest for each in self._known.values() if each.origin in origins}

    @contextmanager
    def renewed(self) -> Iterator[tuple[str, ...]]:
        """Inside, what has changed on the disk is imported anew; what is raised there puts all back as it was.

        Yields:
            `name version`, or `name old → new`, of what has changed.

        Raises:
            ConfigError: a distribution has changed of which a compiled module is loaded.
        """
        importlib.invalidate_caches()
        changed = [(name, entries) for name, entries in self._installed().items() if self._has_changed(name, entries)]
        said = tuple(_said(self._known.get(name), entries) for name, entries in changed)
        before = self._known, self._noted_at
        taken: dict[str, ModuleType] = {}
        for _, entries in changed:
            taken |= _modules(entries)
        compiled = sorted(name for name, module in taken.items() if _file(module).endswith(_COMPILED))
        if compiled:
            raise ConfigError(
                f"{', '.join(said)}: needs a restart, for {', '.join(compiled)} is compiled and stays as it was loaded"
            )
        for name in taken:
            del sys.modules[name]
        try:
            yield said
        except BaseException:
            for _, entries in changed:
                for name in _modules(entries):
                    del sys.modules[name]
            sys.modules.update(taken)
            _bind(taken)
            self._known, self._noted_at = before
            raise

    def _installed(self) -> dict[str, list[EntryPoint]]:
        from importlib import metadata

        by_distribution: dict[int, list[EntryPoint]] = {}
        for entry in metadata.entry_points(group=GROUP) if self._entry_points is None else self._entry_points:
            if entry.dist is not None:
                by_distribution.setdefault(id(entry.dist), []).append(entry)
        # A distribution reads its metadata anew each time it is asked for its name.
        found = {normal(_origin(entries).partition(" ")[0]): entries for entries in by_distribution.values()}
        return {name: entries for name, entries in found.items() if name != PROJECT}

    def _has_changed(self, name: str, entries: Sequence[EntryPoint]) -> bool:
        known, now = self._known.get(name), _loaded(entries)
        if known is None or known.origin != now.origin:
            return bool(now.files)
        # What was imported since is as it was noted where its file is older.
        return any(
            digest != known.files[module] if module in known.files else _touched(sys.modules[module]) > self._noted_at
            for module, digest in now.files.items()
        )


def _loaded(entries: Sequence[EntryPoint]) -> Loaded:
    files = {name: _digest(_file(module)) for name, module in _modules(entries).items()}
    return Loaded(origin=_origin(entries), files=files)


def _modules(entries: Sequence[EntryPoint]) -> dict[str, ModuleType]:
    """The modules of one distribution that are loaded."""
    roots = {_root(entry.module) for entry in entries} - {PROJECT, *sys.stdlib_module_names}
    beneath = tuple(f"{root}." for root in roots)
    named = {name for name in list(sys.modules) if name in roots or name.startswith(beneath)}
    listed = {name for name, file in _files(entries[0].dist).items() if _file(sys.modules.get(name)) == file}
    return {name: sys.modules[name] for name in sorted(named | listed) if _file(sys.modules[name])}


def _root(module: str) -> str:
    """The outermost package of *module* that is no namespace, for a namespace belongs to several distributions."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return next((name for name in names if _file(sys.modules.get(name))), module)


def _files(distribution: Distribution | None) -> dict[str, str]:
    """Module → path, of those in a distribution's record; an editable one's has none."""
    listed = (distribution.files or ()) if distribution is not None else ()
    return {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__"): os.path.realpath(str(file.locate()))
        for file in listed
        if file.suffix == ".py"
    }


def _file(module: ModuleType | None) -> str:
    """The path of its file; "" for a namespace and what is built in."""
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) else ""


def _digest(path: str) -> str:
    try:
        if path.endswith(_COMPILED):
            stat = Path(path).stat()
            return f"{stat.st_size} {stat.st_mtime_ns}"
        return sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _touched(module: ModuleType) -> float:
    try:
        return Path(_file(module)).stat().st_ctime
    except OSError:
        return math.inf


def _origin(entries: Sequence[EntryPoint]) -> str:
    distribution = entries[0].dist
    assert distribution is not None, "entry points of no distribution were left out"
    return f"{distribution.name} {distribution.version}"


def _said(known: Loaded | None, entries: Sequence[EntryPoint]) -> str:
    now = _origin(entries)
    return now if known is None or known.origin == now else f"{known.origin} → {now.rpartition(' ')[2]}"


def _bind(modules: Mapping[str, ModuleType]) -> None:
    """Make packages name their modules again: importing binds a module in its package."""
    for name, module in modules.items():
        package, _, last = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], last, module)
