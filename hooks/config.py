"""Reads the configuration: profiles, headrace.toml, environment and flags into `Settings`, each value with its origin.

Knows no component: the options of one are checked when the registry builds it, with a `Where` from here that says
where they were written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

from .config_text import Setting, documentation, flags, is_text, settings
from .decode import Bytes, Problem, Use, decode
from .errors import ConfigError
from .layers import Layer, merge, read_toml, single
from .locks import unknown_words
from .origins import Origins, Where
from .params import SamplingParams
from .profiles import Profiles
from .settings import Line, Model, PhaseUse, Plugins, Sampling, Server, Settings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "Bytes",
    "Line",
    "Loaded",
    "Merged",
    "Model",
    "PhaseUse",
    "Plugins",
    "Sampling",
    "Server",
    "Setting",
    "Settings",
    "Use",
    "Where",
    "checked",
    "documentation",
    "flags",
    "load",
    "merged",
    "settings",
]

ENVIRON_PREFIX: Final = "HEADRACE__"


class Loaded(Struct, frozen=True, kw_only=True):
    """Settings, and who set them."""

    settings: Settings
    origins: Origins

    def origin(self, key: str) -> str:
        """Where the value of *key* came from: `headrace.toml:17:1`, a variable, a flag, or `default`."""
        return self.origins.origin(tuple(key.split(".")))

    def where(self, key: str) -> Where:
        """*key* as the registry takes it, to say in an error where it was written."""
        return Where(tuple(key.split(".")), self.origins)


class Sources(Struct, frozen=True, kw_only=True):
    """Where settings are read from, the lowest first; the built-in defaults lie under all, a request goes over all.

    Attributes:
        profile_entry_points: what is installed; None: look.
        profiles: from `--profile`; they replace those that the file names.
        file: a headrace.toml; None: no file.
        environ: variables; those that begin with `HEADRACE__` count.
        flags: key, such as `line.max_running`, → text, for settings that were given with their own flag.
        sets: `KEY=VALUE`, from `--set`; they win over *flags*.
    """

    profile_entry_points: Iterable[EntryPoint] | None = None
    profiles: Sequence[str] = ()
    file: Path | None = None
    environ: Mapping[str, str] = {}
    flags: Mapping[str, str] = {}
    sets: Sequence[str] = ()


class Merged(Struct, frozen=True, kw_only=True):
    """All sources laid over each other, before anything but their form was checked.

    Attributes:
        values: as TOML has them; every setting is there.
        problems: of the sources themselves: a file that is no TOML, a profile that is not there.
    """

    values: dict[str, Any]
    origins: Origins
    problems: list[Problem]


def load(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    profiles: Sequence[str] = (),
    profile_entry_points: Iterable[EntryPoint] | None = None,
) -> Loaded:
    """Merge all sources and check everything; see `Sources` for the arguments.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    sources = Sources(
        file=file,
        environ=environ or {},
        flags=flags or {},
        sets=sets,
        profiles=profiles,
        profile_entry_points=profile_entry_points,
    )
    return checked(merged(sources))


def merged(sources: Sources) -> Merged:
    """Lay all sources over each other."""
    problems: list[Problem] = []
    layers = [
        *_file(sources.file, problems),
        *_environ(sources.environ),
        *_flags(sources.flags),
        *_sets(sources.sets, problems),
        *([single(("profile",), list(sources.profiles), "--profile")] if sources.profiles else []),
    ]
    values: dict[str, Any] = msgspec.to_builtins(Settings(), enc_hook=int)
    origins = Origins()
    for layer in (*_profiles(layers, Profiles(sources.profile_entry_points), problems), *layers):
        merge(values, layer, origins)
    return Merged(values=values, origins=origins, problems=problems)


def checked(merged: Merged) -> Loaded:
    """Make settings of what was merged.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    problems, root = list(merged.problems), Where((), merged.origins)
    values = {**merged.values}
    values["sampling"] = _settled_defaults(values["sampling"], root, problems)
    problems += unknown_words(_texts(values["sampling"], "locked"), root / "sampling" / "locked")
    loaded = decode(values, Settings, root, problems)
    if loaded is not None:
        problems += _conflicts(loaded, root)
    if loaded is None or problems:
        raise ConfigError("\n".join(map(str, problems)))
    return Loaded(settings=loaded, origins=merged.origins)


def _file(file: Path | None, problems: list[Problem]) -> list[Layer]:
    if file is None:
        return []
    try:
        return [read_toml(file.read_text(encoding="utf-8"), str(file), problems)]
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(Where((str(file),)), f"cannot be read: {error}"))
        return []


def _environ(environ: Mapping[str, str]) -> Iterator[Layer]:
    for name in sorted(environ):
        if name.startswith(ENVIRON_PREFIX):
            path = tuple(name.removeprefix(ENVIRON_PREFIX).lower().split("__"))
            yield single(path, _value(path, environ[name]), name)


def _flags(given: Mapping[str, str]) -> Iterator[Layer]:
    names = {setting.key: setting.flag for setting in flags()}
    for key, text in given.items():
        path = tuple(key.split("."))
        yield single(path, _value(path, text), names.get(key, "--set"))


def _sets(sets: Sequence[str], problems: list[Problem]) -> Iterator[Layer]:
    for item in sets:
        key, equals, text = item.partition("=")
        path = tuple(key.strip().split("."))
        if equals and all(path):
            yield single(path, _value(path, text), "--set")
        else:
            problems.append(Problem(Where((f"--set {item}",)), "must be KEY=VALUE, such as line.max_running=32"))


def _profiles(layers: Sequence[Layer], installed: Profiles, problems: list[Problem]) -> list[Layer]:
    chosen = next((layer for layer in reversed(layers) if "profile" in layer.values), None)
    names = chosen.values["profile"] if chosen else []
    if chosen is None or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    origins = Origins()
    origins.note(("profile",), names, chosen.place)
    return installed.layers(names, Where(("profile",), origins), problems)


def _value(path: tuple[str, ...], text: str) -> object:
    """*text* as TOML, or else as itself; the setting's type decides where both are possible."""
    kinds = {setting.key: setting.type for setting in settings()}
    kind = kinds.get(".".join(path), str if path[-1] == "use" else Any)
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if len(parsed) == 1 else text
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(bare) is tuple and not isinstance(value, list):
        return [item.strip() for item in str(value).split(",") if item.strip()]
    return value if isinstance(value, str | list | dict) or not is_text(kind) else text


def _settled_defaults(sampling: Any, root: Where, problems: list[Problem]) -> Any:
    """Check the sampling defaults by the rules of a request, and give *sampling* with them as a request has them."""
    defaults = sampling.get("defaults") if isinstance(sampling, dict) else None
    if not isinstance(defaults, dict):
        return sampling
    params = decode(defaults, SamplingParams, root / "sampling" / "defaults", problems)
    settled = defaults if params is None else {name: getattr(params, name) for name in defaults}
    return {**sampling, "defaults": settled}


def _texts(section: Any, name: str) -> Sequence[str]:
    """The array of text *name* in a section, as far as it is one."""
    found = section.get(name) if isinstance(section, dict) else None
    return found if isinstance(found, list | tuple) and all(isinstance(item, str) for item in found) else ()


def _conflicts(loaded: Settings, root: Where) -> Iterator[Problem]:
    """What is wrong between settings that are right one by one."""
    line = loaded.line

    def conflict(reason: str, *names: str) -> Problem:
        paths = [("line", name) for name in names]
        written = [path for path in paths if root.origins.origin(path) != "default"]
        return Problem(Where((written or paths)[0], root.origins), reason)

    for least in ("block_size", "max_running"):
        if line.max_step_tokens < getattr(line, least):
            reason = f"max_step_tokens must be >= {least} ({getattr(line, least)}), got {line.max_step_tokens}"
            yield conflict(reason, "max_step_tokens", least)
    if line.kv_memory is not None and line.kv_blocks is not None:
        yield conflict("kv_memory and kv_blocks say the same thing; set one of them", "kv_blocks")
    if line.plugin_stall_s < line.watchdog_s:
        reason = f"plugin_stall_s must be >= watchdog_s ({line.watchdog_s:g}), got {line.plugin_stall_s:g}"
        yield conflict(reason, "plugin_stall_s", "watchdog_s")
    max_model_len = loaded.model.max_model_len
    if max_model_len and line.max_prompt_tokens and line.max_prompt_tokens < max_model_len:
        reason = f"must be >= model.max_model_len ({max_model_len}), got {line.max_prompt_tokens}"
        yield conflict(reason, "max_prompt_tokens")
    yield from _twice(loaded.sampling, root / "sampling")


def _twice(sampling: Sampling, where: Where) -> Iterator[Problem]:
    """Requests name a processor without its plugin, so a name may stand only once."""
    uses = [
        (use, where / "phases" / index / "processors" / position)
        for index, phase in enumerate(sampling.phases)
        for position, use in enumerate(phase.processors)
    ]
    uses += [(use, where / "extra_processors" / index) for index, use in enumerate(sampling.extra_processors)]
    seen: set[str] = set()
    for use, place in uses:
        name = use.use.rpartition("/")[2]
        if name in seen:
            yield Problem(place, f"the processor {name} already stands in this chain")
        seen.add(name)
