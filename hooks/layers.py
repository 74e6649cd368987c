"""Layers of plain settings, merged from the lowest to the highest: tables merge, arrays and single values replace."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from .decode import Problem
from .origins import Origins, Path, Where
from .toml_positions import positions

_TOML_ERROR: Final = re.compile(
    r"(?P<reason>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", re.DOTALL
)


class Layer(Struct, frozen=True):
    """Settings from one source, as a tree, and where each key of it is written."""

    values: dict[str, Any]
    place: Callable[[Path], str]


def read_toml(text: str, name: str, problems: list[Problem]) -> Layer:
    """The settings in *text*; an empty layer and one problem where it is not TOML.

    Args:
        name: what places begin with: the file, or `profile NAME`.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(_syntax(error, text, name))
        return Layer({}, lambda path: name)
    known = positions(text)

    def place(path: Path) -> str:
        line, column = next((known[path[:n]] for n in range(len(path), 0, -1) if path[:n] in known), (1, 1))
        return f"{name}:{line}:{column}"

    return Layer(values, place)


def single(path: Path, value: object, place: str) -> Layer:
    """One value from one place."""
    for part in reversed(path):
        value = {part: value}
    assert isinstance(value, dict)
    return Layer(value, lambda _: place)


def merge(values: dict[str, Any], layer: Layer, origins: Origins) -> None:
    """Put *layer* over *values*, in place, and note its places in *origins*."""
    _merge(values, layer.values, (), layer.place, origins)


def _merge(
    values: dict[str, Any], over: Mapping[str, Any], path: Path, place: Callable[[Path], str], origins: Origins
) -> None:
    for key, value in over.items():
        here, old = (*path, key), values.get(key)
        # Options belong to the component they were written for: another `use` leaves none of them.
        if isinstance(value, dict) and isinstance(old, dict) and value.get("use", old.get("use")) == old.get("use"):
            origins.places[here] = place(here) if here not in origins.leaves else origins.places[here]
            _merge(old, value, here, place, origins)
            continue
        origins.forget(here)
        origins.note(here, value, place)
        is_name = isinstance(value, str) and isinstance(old, dict) and "use" in old
        values[key] = {"use": value, "options": {}} if is_name else copy.deepcopy(value)


def _syntax(error: tomllib.TOMLDecodeError, text: str, name: str) -> Problem:
    match = _TOML_ERROR.fullmatch(str(error))
    if match is None:
        return Problem(Where((name,)), str(error))
    line, column = match["line"] or text.count("\n") + 1, match["column"] or len(text) - text.rfind("\n")
    return Problem(Where((f"{name}:{line}:{column}",)), f"not TOML: {match['reason']}")
