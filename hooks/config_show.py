"""Settings as a flat list, each value with who said so; written as TOML, they make a file that says the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from .config import Loaded
from .config_text import settings
from .origins import Path

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


class Line(Struct, frozen=True, kw_only=True):
    """One value.

    Attributes:
        key: as TOML writes it, with dots.
        value: as TOML has it; None: unset.
        origin: `file:line:column`, a variable, a flag, `profile NAME:line:column`, or `default`.
    """

    key: str
    value: Any
    origin: str


def lines(loaded: Loaded) -> Iterator[Line]:
    """Every setting. Tables are taken apart, so that each value has the place where it was written; arrays are not."""
    values = msgspec.to_builtins(loaded.settings, enc_hook=int, str_keys=True)
    for setting in settings():
        path = tuple(setting.key.split("."))
        value = values
        for part in path:
            value = value[part]
        yield from _lines(loaded, path, _plain(value))


def as_toml(value: Any) -> str:
    """*value* as TOML writes it, on one line."""
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_word(key)} = {as_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _plain(value: Any) -> Any:
    """A component without options is its name alone; what is unset inside a table is left out."""
    if isinstance(value, Mapping):
        if value.keys() == {"use", "options"} and not value["options"]:
            return value["use"]
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _lines(loaded: Loaded, path: Path, value: Any) -> Iterator[Line]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _lines(loaded, (*path, key), item)
    else:
        yield Line(key=".".join(map(_word, path)), value=value, origin=loaded.origins.origin(path))


def _word(part: object) -> str:
    text = str(part)
    return text if _BARE.fullmatch(text) else as_toml(text)
