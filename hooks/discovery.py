"""From installed distributions to the components they offer: scan, gate, import, check, register.

One broken plugin never stops the others: it is noted as failed, with a reason. Whether that matters is known only when
something is chosen.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pluggy

from .components import Component, PluginInfo, Registrar
from .decode import did_you_mean
from .errors import ConfigError
from .origins import Where
from .slots import PROJECT, SLOTS, hookspecs

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "headrace.plugins"
SUPPORTED_API: Final = frozenset({1})
"""Values of `headrace_api` in a plugin that this version can call. A plugin without one means 1."""


class Broken(Exception):
    """Why a plugin cannot be used."""


class Gate:
    """Which plugins may be imported.

    Args:
        disable: plugins or distributions that may not.
        allow: distributions that may fill opt-in slots, and with *strict* the only ones to be imported.
        switch: `HEADRACE_PLUGINS`: None, `off` or empty (built-ins only), or names to import besides the built-ins.
        where: the key `plugins` of the configuration.
    """

    def __init__(
        self, *, disable: Sequence[str], allow: Sequence[str], strict: bool, switch: str | None, where: Where
    ) -> None:
        self._disable = disable
        self._allow = allow
        self._strict = strict
        self._where = where
        names = [name.strip() for name in (switch or "").split(",") if name.strip()]
        self._only = None if switch is None else () if names == ["off"] else tuple(names)

    def check(self, plugins: Iterable[PluginInfo]) -> None:
        """Raises:
        ConfigError: a name that nothing installed has would do nothing, in silence.
        """
        found = list(plugins)
        distributions = {normal(each.distribution) for each in found if each.distribution}
        either = distributions | {each.id for each in found}
        lists = (
            (self._where / "allow", "distribution with plugins", self._allow, distributions),
            (self._where / "disable", "plugin or distribution", self._disable, either),
            (Where(("HEADRACE_PLUGINS",)), "plugin or distribution", self._only or (), either),
        )
        problems = [
            f"{where}: no {what} called {name!r} is installed{did_you_mean(name, known)} "
            f"(installed: {', '.join(sorted(known)) or 'none'})"
            for where, what, names, known in lists
            for name in names
            if name not in known and normal(name) not in known
        ]
        if problems:
            raise ConfigError("\n".join(problems))

    def shut(self, plugin: PluginInfo) -> str:
        """Why *plugin* is not imported; "" where it is."""
        if _named(plugin, self._disable):
            return "disabled by plugins.disable"
        if builtin(plugin):
            return ""
        if self._only is not None and not _named(plugin, self._only):
            return "switched off by HEADRACE_PLUGINS"
        if self._strict and not self.trusts(plugin):
            return f"plugins.strict is set and plugins.allow lacks {plugin.distribution}"
        return ""

    def trusts(self, plugin: PluginInfo) -> bool:
        """Whether it may fill opt-in slots."""
        return builtin(plugin) or normal(plugin.distribution) in map(normal, self._allow)


def discover(entry_points: Iterable[EntryPoint] | None, gate: Gate) -> tuple[list[PluginInfo], list[Component]]:
    """Every installed plugin in the order of (distribution, name), and the components of those that work."""
    # Imported late: it costs a fifth of what importing this package does.
    from importlib import metadata

    entries = metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    origins: dict[int, tuple[str, str]] = {}
    found = sorted(
        ((_info(entry, origins), entry) for entry in entries), key=lambda each: (each[0].distribution, each[0].id)
    )
    gate.check(info for info, _ in found)
    components: list[Component] = []
    for info, _ in found:
        info.reason = gate.shut(info)
        info.state = "skipped" if info.reason else "loaded"
    for info, entry in found:
        if info.state == "loaded":
            rivals = [each for each, _ in found if each.id == info.id and each.state != "skipped"]
            components += load(info, entry.load, rivals=rivals, trusted=gate.trusts(info))
    return [info for info, _ in found], components


def load(
    info: PluginInfo, importer: Callable[[], object], *, rivals: Sequence[PluginInfo], trusted: bool
) -> list[Component]:
    """Import one plugin and let it register; a failure is noted in *info* and leaves no component.

    Args:
        importer: returns the plugin: a module or a namespace with marked hooks.
        rivals: all plugins of this name, itself included.
        trusted: it may fill opt-in slots.
    """
    components: list[Component] = []
    try:
        _check_name(info, rivals)
        _collect(info, _import(info, importer), components, trusted=trusted)
    except Broken as error:
        info.state, info.reason = "failed", str(error)
    for component in components:
        slot = component.slot.name
        info.slots[slot] = (*info.slots.get(slot, ()), component.name)
    return components if info.state == "loaded" else []


def builtin(plugin: PluginInfo) -> bool:
    """It came with Headrace itself."""
    return normal(plugin.distribution) == PROJECT


def normal(distribution: str) -> str:
    """The one spelling of a distribution's name that all others stand for."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _named(plugin: PluginInfo, names: Iterable[str]) -> bool:
    return any(name == plugin.id or normal(name) == normal(plugin.distribution) for name in names)


def _info(entry: EntryPoint, origins: dict[int, tuple[str, str]]) -> PluginInfo:
    """What the entry point says. *origins*: kept, for a distribution parses its metadata each time it is asked."""
    if entry.dist is None:
        return PluginInfo(id=entry.name)
    if id(entry.dist) not in origins:
        origins[id(entry.dist)] = entry.dist.name, entry.dist.version
    distribution, version = origins[id(entry.dist)]
    return PluginInfo(id=entry.name, distribution=distribution, version=version)


def _check_name(info: PluginInfo, rivals: Sequence[PluginInfo]) -> None:
    if len(rivals) > 1 and not builtin(info):
        owners = " and ".join(sorted(each.origin for each in rivals))
        raise Broken(f"{len(rivals)} distributions bring a plugin of this name: {owners}; disable all but one of them")


def _import(info: PluginInfo, importer: Callable[[], object]) -> object:
    start = time.perf_counter()
    try:
        return importer()
    # Somebody else's module may raise anything, or try to end the process.
    except (Exception, SystemExit) as error:
        raise Broken(f"cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        info.import_ms = (time.perf_counter() - start) * 1000


def _collect(info: PluginInfo, plugin: object, components: list[Component], *, trusted: bool) -> None:
    api = getattr(plugin, "headrace_api", 1)
    if api not in SUPPORTED_API:
        supported = ", ".join(map(str, sorted(SUPPORTED_API)))
        raise Broken(f"its headrace_api is {api!r} and this Headrace has {supported}; install versions that match")
    # A manager of its own: a plugin's hooks can reach no other plugin, and a failed one leaves nothing behind.
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(_specs())
    try:
        manager.register(plugin, name=info.id)
        callers = manager.get_hookcallers(plugin) or []
        _check_hooks([caller.name for caller in callers if not caller.has_spec()])
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise Broken(" ".join(str(error).split())) from error
    if not callers:
        raise Broken("it has no hook; mark each register_… function with headrace.hooks.registry.plugin")
    for caller in callers:
        slot = SLOTS[caller.name.removeprefix("register_")]
        if slot.opt_in and not trusted:
            info.withheld = (*info.withheld, slot.name)
        else:
            _call(caller, Registrar(slot, info, components))


@cache
def _specs() -> Any:
    return hookspecs()


def _check_hooks(unknown: Sequence[str]) -> None:
    names = [f"register_{name}" for name in SLOTS]
    if unknown:
        raise Broken("; ".join(f"there is no hook {name}{did_you_mean(name, names)}" for name in unknown))


def _call(caller: pluggy.HookCaller, register: Registrar) -> None:
    for implementation in caller.get_hookimpls():
        if inspect.iscoroutinefunction(implementation.function):
            raise Broken(f"{caller.name} must be a plain function, not async")
    try:
        caller(register=register)
    except Exception as error:
        raise Broken(f"{caller.name}: {str(error) or type(error).__name__}") from error
