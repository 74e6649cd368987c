"""Which setting chooses a component of which slot, and what is wrong with the choices, all of it at once.

Looks at what is registered and builds nothing, so no model is needed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from .components import Component
from .config_text import settings
from .decode import Problem, Use, decode
from .errors import ConfigError, PluginError
from .locks import unknown_fields
from .origins import Path, Where
from .registry import Registry
from .settings import PhaseUse, Settings
from .slots import SLOTS

_SHORT: Final = {
    "policy": "scheduler_policy",
    "phases": "logits_processor",
    "extra_processors": "logits_processor",
    "stop_watchers": "stop",
}
NOTHING: Final = "none"
"""In the settings of slots that nothing needs to fill."""
OF_THE_MODEL: Final = {
    "model.quantizer": "",
    "model.attention": "",
    "model.kernels": "",
    "model.threads": "",
    "line.kv_memory": "; line.kv_blocks says how much it may hold",
    "line.memory_headroom": "",
}
"""Settings of Headrace's own model → what to set where an executor does without that model."""


class Choice(Struct, frozen=True, kw_only=True):
    """One component that a configuration names.

    Attributes:
        use: as written: a name, or a table with `use` and `options`.
    """

    slot: str
    path: Path
    use: Any


@cache
def keys() -> Mapping[str, str]:
    """Key of each setting that names components → its slot."""
    found = {setting.key: _slot(setting.key) for setting in settings() if _names_components(setting.type)}
    return types.MappingProxyType(found)


def choices(values: Mapping[str, Any]) -> Iterator[Choice]:
    """Every component that *values* name; whatever has the wrong shape is left out.

    Args:
        values: all settings as TOML has them.
    """
    for key, slot in keys().items():
        path = tuple(key.split("."))
        yield from _inside(_get(values, path), slot, path)


class Chosen(Struct, frozen=True, kw_only=True):
    """A choice, found.

    Attributes:
        options: with the component's own defaults; None where they are wrong.
    """

    choice: Choice
    component: Component
    options: Struct | None = None


def examine(registry: Registry, values: Mapping[str, Any], root: Where, problems: list[Problem]) -> list[Chosen]:
    """Find what is chosen, and check its options and the locks.

    Args:
        root: the top of the configuration, for places.
        problems: what is wrong is added here.
    """
    found: list[Chosen] = []
    for choice in choices(values):
        name, options = _parts(choice.use)
        where = Where(choice.path, root.origins)
        if not isinstance(name, str) or not isinstance(options, Mapping):
            continue  # Told by whoever checks the shapes.
        if name == NOTHING and not any(each.name == NOTHING for each in registry.offered(choice.slot)):
            continue
        try:
            component = registry.select(choice.slot, name)
        except (ConfigError, PluginError) as error:
            problems.append(Problem(where, str(error)))
            continue
        found.append(Chosen(choice=choice, component=component, options=_options(component, options, where, problems)))
        if choice.slot == "executor":
            try:
                problems += idle(values, component, lambda key: Where(tuple(key.split(".")), root.origins))
            except PluginError as error:
                problems.append(Problem(where, str(error)))
    locked = _get(values, ("sampling", "locked"))
    if isinstance(locked, list | tuple) and all(isinstance(lock, str) for lock in locked):
        slots = {"logits": "logits_processor", "stop": "stop"}
        chains = {
            section: {each.component.name: each.component.params for each in found if each.choice.slot == slot}
            for section, slot in slots.items()
        }
        sampler = next((each.component.params for each in found if each.choice.slot == "sampler"), None)
        problems += unknown_fields(locked, chains, sampler, root / "sampling" / "locked")
    return found


def uses_model(executor: Component) -> bool:
    """Whether Headrace's own model runs the steps; see `protocols.Executor`.

    Raises:
        PluginError: the factory cannot be imported.
    """
    return getattr(executor.resolve(), "uses_model", False) is True


def idle(values: Mapping[str, Any], executor: Component, where: Callable[[str], Where]) -> Iterator[Problem]:
    """The settings of Headrace's own model that somebody changed although *executor* does without that model.

    Args:
        values: all settings as TOML has them.
        where: says where a key was written.

    Raises:
        PluginError: see `uses_model`.
    """
    if uses_model(executor):
        return
    defaults = msgspec.to_builtins(Settings(), enc_hook=int)
    for key, instead in OF_THE_MODEL.items():
        path = tuple(key.split("."))
        if _parts(_get(values, path)) != _parts(_get(defaults, path)):
            reason = f"means nothing to the executor {executor.name} of plugin {executor.plugin}, which does not run"
            yield Problem(where(key), f"{reason} Headrace's own model; leave it out{instead}")


def _options(component: Component, options: Mapping[str, Any], where: Where, problems: list[Problem]) -> Struct | None:
    if component.config is None:
        if options:
            problems.append(Problem(where / "options", f"{component.name} takes no options, got {', '.join(options)}"))
        return None
    return decode(options, component.config, where / "options", problems)


def _inside(value: Any, slot: str, path: Path) -> Iterator[Choice]:
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _inside(item, slot, (*path, str(index)))
    elif isinstance(value, Mapping) and "processors" in value:
        yield from _inside(value["processors"], slot, (*path, "processors"))
    elif isinstance(value, str | Mapping) and value:
        yield Choice(slot=slot, path=path, use=value)


def _parts(use: Any) -> tuple[Any, Any]:
    return (use.get("use"), use.get("options", {})) if isinstance(use, Mapping) else (use, {})


def _get(values: Mapping[str, Any], path: Path) -> Any:
    found: Any = values
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _slot(key: str) -> str:
    """The slot a key speaks of: the last word of it names it, in short, in full or in the plural."""
    word = key.rpartition(".")[2]
    names = (_SHORT.get(word), word, word.removesuffix("s"))
    return next(name for name in names if name in SLOTS)


def _names_components(kind: Any) -> bool:
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if bare in (Use, PhaseUse):
        return True
    if get_origin(bare) in (tuple, dict, list, Union, types.UnionType):
        return any(_names_components(member) for member in get_args(bare))
    return False


def shown_options(options: Struct | None) -> dict[str, Any]:
    """The fields of *options* as plain values."""
    return msgspec.to_builtins(options, enc_hook=str) if options is not None else {}
