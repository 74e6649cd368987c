"""What is made from the settings: flags for the command line and the page docs/configuration.md."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from .decode import Bytes, Use, describe
from .settings import NOT_IN_PROFILES, SECTIONS, PhaseUse, Settings


class Setting(Struct, frozen=True, kw_only=True):
    """One setting.

    Attributes:
        key: `line.max_running`.
        flag: `--max-running`.
        environ: `HEADRACE__LINE__MAX_RUNNING`.
        type: the annotation, limits included; *accepts* says it in words.
        default: None stands for "unset".
    """

    key: str
    flag: str
    environ: str
    type: Any
    accepts: str
    default: Any
    description: str

    @property
    def is_switch(self) -> bool:
        """True or false: the command line has `--flag` and `--no-flag`."""
        return self.type is bool or get_args(self.type)[:1] == (bool,)


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting, in the order of the documentation."""
    return tuple(setting for section in ("", *SECTIONS) for setting in _settings(section))


def flags() -> tuple[Setting, ...]:
    """The settings that have a flag: all but tables and lists of components, and the choice of profiles."""
    without = ("profile", "sampling.defaults")
    return tuple(
        setting for setting in settings() if setting.key not in without and not _lists_components(setting.type)
    )


def _lists_components(kind: Any) -> bool:
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_origin(bare) is tuple and get_args(bare)[0] in (Use, PhaseUse)


def _settings(section: str) -> Iterator[Setting]:
    for field in msgspec.structs.fields(_struct(section)):
        if field.name in SECTIONS:
            continue
        key = f"{section}.{field.name}" if section else field.name
        words = key if section == "plugins" else field.name
        yield Setting(
            key=key,
            flag="--" + words.replace(".", "-").replace("_", "-"),
            environ="HEADRACE__" + key.replace(".", "__").upper(),
            type=field.type,
            accepts=describe(field.type),
            default=field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory(),
            description=_description(field.type),
        )


def _struct(section: str) -> type[Struct]:
    return type(getattr(Settings(), section)) if section else Settings


def _description(kind: Any) -> str:
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description), "")


def is_text(kind: Any) -> bool:
    """Whether a string is among what *kind* accepts, or is what the string in it stands for."""
    return any(member in (str, Use, Bytes) or get_origin(member) is Literal for member in _members(kind))


def _members(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


_HEAD: Final = """# Configuration

Every setting has a default. Values come from, later ones winning:

1. the defaults below,
2. profiles, named by `profile = ["NAME"]` or `--profile NAME`, from left to right,
3. the configuration file, `headrace.toml`,
4. the environment: `HEADRACE__LINE__MAX_RUNNING=32`, where two underscores stand for a dot,
5. the command line: `--max-running 32`, or `--set line.max_running=32` for any key.

A request goes over all of them with what it sets itself, except for what stands in `sampling.locked`.

`headrace config show --origin` prints every value and who said so, and `headrace config check` everything that is
wrong, choices of components and their options included, without a model.

Tables merge; arrays and single values replace. In the environment and on the command line a value is read as TOML and,
where that fails, as text; an array may be written with commas. All mistakes are reported at once, each with its place.

A *component* is chosen by name, `policy = "fcfs"`, or with options: `policy = { use = "fcfs", options = { … } }`. Where
two plugins offer the same name, write `plugin/name`.

`HEADRACE_PLUGINS=off` loads no plugin but the built-in ones, `HEADRACE_PLUGINS=a,b` only those two besides.

A profile is a TOML file that a distribution offers as data in the entry-point group `headrace.profiles`
(`creative = "acme_profiles:creative.toml"`); no code of it runs. It may contain everything but
"""

_PHASES: Final = """

The default phases of sampling, as a file would write them:

```toml
[sampling]
phases = [
{}
]
```
"""


def documentation() -> str:
    """The page docs/configuration.md, whole."""
    forbidden = ", ".join(f"`{key}`" for key in NOT_IN_PROFILES)
    lines = [_HEAD + forbidden + "."]
    for section in ("", *SECTIONS):
        title = f"`[{section}]`" if section else "Top level"
        lines += ["", f"## {title}", "", (_struct(section).__doc__ or "").strip(), ""]
        lines += ["| setting | flag | takes | default | |", "|---|---|---|---|---|"]
        with_flag = {setting.key for setting in flags()}
        for setting in _settings(section):
            cells = (
                f"`{setting.key.rpartition('.')[2]}`",
                f"`{setting.flag}`" if setting.key in with_flag else "",
                setting.accepts,
                _shown(setting.default),
                setting.description,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + _PHASES.format("\n".join(map(_phase, Settings().sampling.phases)))


def _phase(phase: PhaseUse) -> str:
    return f"    {{ phase = {_toml(phase.phase)}, processors = {_toml(phase.processors)} }},"


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple) and value and isinstance(value[0], PhaseUse):
        return "see below"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Bytes() if value % 1024**2 == 0:
            return f'"{value // 1024**2}MiB"'
        case str():
            return f'"{value}"'
        case Use():
            return f'"{value.use}"'
        case tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case dict() if not value:
            return "{}"
    return str(value)
