"""Line and column of every key of a TOML document, which `tomllib` does not keep.

The text must already have been accepted by `tomllib`: this scanner only finds keys and takes no decision. Keys inside
an inline table or an array have no position of their own; the nearest key around them serves.
"""

from __future__ import annotations

import re
from typing import Final

Position = tuple[int, int]

_STRING: Final = r'"""(?:\\.|[^\\])*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'"
_SPACE: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY: Final = re.compile(r'[ \t]*(?P<part>[\w-]+|"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*')[ \t]*(?P<dot>\.?)", re.ASCII)
_VALUE: Final = re.compile(_STRING + r"|#[^\n]*|[\[{]|[\]}]|\n|[^\"'#\[\]{}\n]+", re.DOTALL)


def positions(text: str) -> dict[tuple[str, ...], Position]:
    """Path of each key → (line, column) of its first mention, both counted from 1.

    Elements of an array of tables have their index in the path: `("observers", "0", "use")`.
    """
    found: dict[tuple[str, ...], Position] = {}
    num_tables: dict[tuple[str, ...], int] = {}
    base: tuple[str, ...] = ()
    at = _skip(_SPACE, text, 0)
    while at < len(text):
        start, brackets = at, len(text[at : at + 2]) - len(text[at : at + 2].lstrip("["))
        keys, at = _dotted(text, at + brackets)
        path = () if brackets else base
        for depth, key in enumerate(keys, 1):
            path = (*path, key)
            found.setdefault(path, _position(text, start))
            if brackets == 2 and depth == len(keys):
                num_tables[path] = num_tables.get(path, 0) + 1
            if brackets and path in num_tables:
                path = (*path, str(num_tables[path] - 1))
                found.setdefault(path, _position(text, start))
        base = path if brackets else base
        at = _skip(_SPACE, text, at + brackets if brackets else _value_end(text, at + 1))
    return found


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _position(text: str, at: int) -> Position:
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def _dotted(text: str, at: int) -> tuple[list[str], int]:
    keys: list[str] = []
    while match := _KEY.match(text, at):
        part, at = match["part"], match.end()
        keys.append(_unquoted(part))
        if not match["dot"]:
            break
    return keys, at


def _unquoted(part: str) -> str:
    if part.startswith("'"):
        return part[1:-1]
    if part.startswith('"'):
        import tomllib

        return str(tomllib.loads(f"key = {part}")["key"])
    return part


def _value_end(text: str, at: int) -> int:
    depth = 0
    while match := _VALUE.match(text, at):
        token, at = match[0], match.end()
        if token == "\n" and depth == 0:
            break
        depth += (token in "[{") - (token in "]}")
    return at
