"""Named sets of settings that distributions offer as data, in the entry-point group `headrace.profiles`.

`creative = "acme_profiles:creative.toml"` names a file inside the package `acme_profiles`, which is found without being
imported: a profile runs no code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Final

from .decode import Problem, did_you_mean
from .layers import Layer, read_toml
from .origins import Origins, Where
from .settings import NOT_IN_PROFILES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "headrace.profiles"


class Profiles:
    """The profiles that are installed."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._entry_points = entry_points

    def layers(
        self, names: Iterable[str], where: Where, problems: list[Problem], inside: tuple[str, ...] = ()
    ) -> list[Layer]:
        """The layers of *names*, lowest first; beneath each one are those that it names itself.

        Args:
            where: who names them.
            inside: the profiles this list stands in, from the outermost.
        """
        layers: list[Layer] = []
        for index, name in enumerate(names):
            here = where / index
            if name in inside:
                problems.append(Problem(here, f"profiles name each other in a circle: {' → '.join((*inside, name))}"))
                continue
            layer = self.read(name, here, problems)
            inner = layer.values.pop("profile", [])
            origins = Origins()
            origins.note(("profile",), inner, layer.place)
            for key in NOT_IN_PROFILES:
                self._refuse(layer, key, problems)
            if isinstance(inner, list) and all(isinstance(each, str) for each in inner):
                layers += self.layers(inner, Where(("profile",), origins), problems, (*inside, name))
            else:
                problems.append(Problem(Where(("profile",), origins), f"must be array of text, got {inner!r}"))
            layers.append(layer)
        return layers

    def read(self, name: str, where: Where, problems: list[Problem]) -> Layer:
        """What the file of *name* alone says; empty, with a problem, where it cannot be read."""
        entries = self._found.get(name, [])
        empty = Layer({}, lambda path: f"profile {name}")
        if len(entries) != 1:
            installed = ", ".join(sorted(self._found)) or "none"
            reason = f"no profile called {name!r}{did_you_mean(name, self._found)} (installed: {installed})"
            if entries:
                owners = " and ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in entries))
                reason = f"two distributions bring a profile called {name!r}: {owners}; uninstall one"
            problems.append(Problem(where, reason))
            return empty
        try:
            return read_toml(_text(entries[0]), f"profile {name}", problems)
        except (OSError, ImportError, UnicodeDecodeError) as error:
            problems.append(Problem(where, f"profile {name!r} ({entries[0].value}) cannot be read: {error}"))
            return empty

    @cached_property
    def _found(self) -> dict[str, list[EntryPoint]]:
        # Looked for only where a profile is named; most of the time is the import.
        from importlib import metadata

        found: dict[str, list[EntryPoint]] = {}
        for entry in metadata.entry_points(group=GROUP) if self._entry_points is None else self._entry_points:
            found.setdefault(entry.name, []).append(entry)
        return found

    def _refuse(self, layer: Layer, key: str, problems: list[Problem]) -> None:
        path = tuple(key.split("."))
        values: object = layer.values
        for part in path:
            if not isinstance(values, dict) or part not in values:
                return
            values = values[part]
        origins = Origins()
        origins.note(path, values, layer.place)
        problems.append(Problem(Where(path, origins), "not allowed in a profile; set it in headrace.toml"))


def _text(entry: EntryPoint) -> str:
    """The file behind *entry*, through the resource reader of its package, which is not imported for it."""
    # A package inside another is looked for from the outermost, for to find it by its name would import that.
    root, *inside = entry.module.split(".")
    spec = importlib.util.find_spec(root)
    find_reader = getattr(spec.loader, "get_resource_reader", None) if spec else None
    if spec is None or find_reader is None:
        raise ModuleNotFoundError(f"no package {root} with files")
    return str(find_reader(spec.name).files().joinpath(*inside, entry.attr).read_text(encoding="utf-8"))
