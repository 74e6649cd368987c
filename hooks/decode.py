"""From plain values (TOML, JSON) to typed Structs, with all problems at once.

`msgspec.convert` stops at the first error inside a Struct. `decode` goes through the fields one by one, so that
somebody with three misspelt settings hears of all three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct, inspect

from .origins import Where

T = TypeVar("T")

_UNITS: Final = {"": 1, "b": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("ib", 1024), ("b", 1000))
}


class Bytes(int):
    """A number of bytes, written as an integer or as `512MiB`, `2GiB`, `1.5GB`."""

    @classmethod
    def parse(cls, value: object) -> Bytes:
        """Raises:
        ValueError: neither.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", value) if isinstance(value, str) else None
        if match and match[2].lower() in _UNITS:
            return cls(Decimal(match[1]) * _UNITS[match[2].lower()])
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        raise ValueError(f"must be a number of bytes such as 1073741824, 512MiB or 2GiB, got {value!r}")


class Use(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A component, chosen by name. In a file, its name alone will do.

    Attributes:
        use: the component, or `plugin/component`.
        options: see the component's own documentation.
    """

    use: str
    options: dict[str, Any] = {}


class Problem(Struct, frozen=True):
    """What is wrong with one value."""

    where: Where
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean x?`, or "" where nothing is close."""
    # Imported late: only an error needs it.
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def decode(raw: object, kind: type[T], where: Where, problems: list[Problem]) -> T | None:
    """Make a *kind* of *raw*, or add to *problems* all that is in the way and return None."""
    found: list[Problem] = []
    plain = _walk(raw, kind, where, found)
    if not found:
        try:
            made: T = convert(plain, kind)
            return made
        except msgspec.ValidationError as error:
            found.append(_problem(plain, kind, where, str(error)))
    problems += found
    return None


def convert(raw: object, kind: Any) -> Any:
    """`msgspec.convert` as used here: keys may be numbers in quotes, `Bytes` may be text."""
    return msgspec.convert(raw, kind, dec_hook=_hook, str_keys=True)


def describe(kind: Any) -> str:
    """What a value of type *kind* must be, for readers: `integer >= 1`."""
    return _describe(inspect.type_info(kind))


def _hook(kind: type, value: object) -> object:
    if kind is Bytes:
        return Bytes.parse(value)
    # What msgspec wants to hear of a type that it has no way to read: a mistake of ours or a plugin's, no bad value.
    raise NotImplementedError(f"{kind} cannot be read from a configuration")


def _walk(raw: object, kind: Any, where: Where, problems: list[Problem]) -> object:
    """Find problems below *raw*, and give it back with each `Use` as a table."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if bare is Use and isinstance(raw, str):
        raw = {"use": raw}
    if isinstance(bare, type) and issubclass(bare, Struct) and isinstance(raw, Mapping):
        return _walk_struct(raw, bare, where, problems)
    if get_origin(bare) is tuple and get_args(bare)[-1] is ... and isinstance(raw, list | tuple):
        return [_walk(item, get_args(bare)[0], where / index, problems) for index, item in enumerate(raw)]
    num_before = len(problems)
    if get_origin(bare) is dict and isinstance(raw, Mapping):
        raw = {key: _walk(item, get_args(bare)[1], where / key, problems) for key, item in raw.items()}
    if len(problems) > num_before:
        return raw
    try:
        convert(raw, kind)
    except msgspec.ValidationError as error:
        problems.append(_problem(raw, kind, where, str(error)))
    return raw


def _walk_struct(raw: Mapping[str, object], kind: type[Struct], where: Where, problems: list[Problem]) -> object:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in raw:
        if key not in fields:
            problems.append(Problem(where / key, f"unknown{did_you_mean(str(key), fields)}"))
    for name, field in fields.items():
        if field.required and name not in raw:
            problems.append(Problem(where, f"{name} is missing"))
    return {key: _walk(value, fields[key].type, where / key, problems) for key, value in raw.items() if key in fields}


def _problem(raw: object, kind: Any, where: Where, message: str) -> Problem:
    message, _, path = message.partition(" - at `$")
    for part in re.findall(r"[^.\[\]`]+", path):
        where = where / part
    if path or not message.startswith(("Expected", "Invalid enum")):
        return Problem(where, message)
    shown = repr(raw) if len(repr(raw)) <= 60 else repr(raw)[:57] + "..."
    return Problem(where, f"must be {describe(kind)}, got {shown}")


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata():
            return _describe(info.type)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "integer" + _limits(info)
        case inspect.FloatType():
            return "number" + _limits(info)
        case inspect.StrType():
            return "text, not empty" if info.min_length else "text"
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, info.values))
        case inspect.UnionType():
            return " or ".join(_describe(each) for each in info.types if not isinstance(each, inspect.NoneType))
        case inspect.VarTupleType() | inspect.ListType():
            return f"array of {_describe(info.item_type)}"
        case inspect.StructType():
            return "component" if info.cls is Use else "table"
        case inspect.CustomType() if info.cls is Bytes:
            return "bytes, such as 512MiB"
        case inspect.DictType():
            return "table"
    return type(info).__name__.removesuffix("Type").lower()


def _limits(info: inspect.IntType | inspect.FloatType) -> str:
    signs = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
    return " and".join(f" {sign} {limit}" for sign, limit in signs if limit is not None)
