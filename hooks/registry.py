"""From installed plugins to the components a configuration chose: scan, gate, import, check, register, select, build.

pluggy works at start-up and nowhere else. What is chosen is frozen into a `Stack` (see stack.py) of plain objects.
Installing a plugin enables nothing; a broken one is fatal only to who chooses it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pluggy

from .components import Bound, Component, PluginInfo
from .decode import Use, did_you_mean
from .discovery import SUPPORTED_API, Gate, discover, load
from .errors import ConfigError, PluginError, StartError
from .origins import Where
from .protocols import Context
from .slots import PROJECT, SLOTS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["SUPPORTED_API", "Bound", "Component", "PluginInfo", "Registry", "plugin"]

plugin: Final = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's hooks: `@plugin def register_sampler(register): …`."""


class Registry:
    """The plugins that are installed and the components that the working ones offer."""

    def __init__(self, plugins: Iterable[PluginInfo] = (), components: Iterable[Component] = ()) -> None:
        self._plugins = list(plugins)
        self._components = list(components)

    @classmethod
    def discover(
        cls,
        *,
        disable: Sequence[str] = (),
        allow: Sequence[str] = (),
        strict: bool = False,
        environ: Mapping[str, str] | None = None,
        entry_points: Iterable[EntryPoint] | None = None,
        where: Where | None = None,
    ) -> Registry:
        """Load every installed plugin that may be loaded.

        Args:
            disable, allow, strict: see `settings.Plugins`.
            environ: where `HEADRACE_PLUGINS` may stand: `off` for the built-ins only, or names of plugins to load
                besides them. None: the process's own.
            entry_points: what is installed; None: look.
            where: the key `plugins` of the configuration, for errors.

        Raises:
            ConfigError: a name in *disable*, *allow* or `HEADRACE_PLUGINS` that nothing installed has.
        """
        switch = (os.environ if environ is None else environ).get("HEADRACE_PLUGINS")
        where = where or Where(("plugins",))
        gate = Gate(disable=disable, allow=allow, strict=strict, switch=switch, where=where)
        return cls(*discover(entry_points, gate))

    def add(self, plugin: object, name: str) -> None:
        """Load a plugin that is already in this process: a module or a namespace with marked hooks.

        Raises:
            PluginError: it cannot be used.
        """
        info = PluginInfo(id=name)
        rivals = [each for each in self._plugins if each.id == name]
        components = load(info, lambda: plugin, rivals=[info, *rivals], trusted=True)
        if info.state == "failed":
            raise PluginError(name, info.reason)
        self._plugins.append(info)
        self._components += components

    def report(self) -> tuple[PluginInfo, ...]:
        """Every installed plugin, also the skipped and failed ones."""
        return tuple(self._plugins)

    def offered(self, slot: str) -> tuple[Component, ...]:
        """The components that fill *slot*."""
        return tuple(component for component in self._components if component.slot is SLOTS[slot])

    def select(self, slot: str, name: str, where: Where | None = None) -> Component:
        """The component called *name*, or `plugin/name`.

        Args:
            where: the key that chose it.

        Raises:
            ConfigError: there is none, or more than one; says what is installed.
            PluginError: the plugin that was to bring it has failed.
        """
        owner, _, bare = name.rpartition("/")
        claims = [each for each in self.offered(slot) if each.name == bare and owner in ("", each.plugin.id)]
        owners = {each.plugin.id for each in claims}
        # A component that takes over another's name is found by its full name only.
        firm = [each for each in claims if owner or each.replaces not in owners - {each.plugin.id}]
        if len(firm) != 1:
            place = f"{where}: " if where else ""
            raise self._missing(slot, owner, bare, place) if not firm else _ambiguous(firm, bare, place)
        firm[0].plugin.state = "selected"
        return firm[0]

    def build(self, slot: str, use: Use, context: Context, where: Where | None = None) -> Bound:
        """Select and build what *use* says.

        Args:
            where: the key of *use* in the configuration.

        Raises:
            StartError: see `select` and `Component.build`.
        """
        where = where or Where((slot,))
        return self.select(slot, use.use, where / "use").build(context, use.options, where / "options")

    def _missing(self, slot: str, owner: str, bare: str, place: str) -> StartError:
        word, offered = slot.replace("_", " "), self.offered(slot)
        failed = [each for each in self._plugins if each.state == "failed"]
        for each in failed:
            if owner == each.id or (not owner and (each.id == bare or bare in each.slots.get(slot, ()))):
                reason = f"{place}{word} {bare} was chosen, but {each.reason}"
                return PluginError(each.id, reason, distribution=each.origin)
        for each in self._plugins:
            if owner == each.id and each.state == "skipped":
                return ConfigError(f"{place}plugin {each} is not loaded: {each.reason}")
        ids = [each.id for each in self._plugins]
        if owner and owner not in ids:
            return ConfigError(f"{place}no plugin called {owner!r} is installed{did_you_mean(owner, ids)}")
        names = sorted({each.name for each in offered})
        reason = f"no {word} called {bare!r}{did_you_mean(bare, names)} (installed: {', '.join(names)})"
        if owner:
            reason = f"plugin {owner} has {reason[:1].lower()}{reason[1:]}"
        if not names:
            reason = f"nothing that is installed fills the slot {slot}, so there is no {word} called {bare!r}"
        notes = [f"plugin {each} failed: {each.reason}" for each in failed]
        notes += [
            f"plugin {each} fills it, but plugins.allow lacks {each.distribution}"
            for each in self._plugins
            if slot in each.withheld
        ]
        return ConfigError("; ".join([place + reason, *notes]))


def _ambiguous(claims: Sequence[Component], bare: str, place: str) -> ConfigError:
    owners = " and ".join(str(each.plugin) for each in claims)
    names = " or ".join(f"{each.plugin.id}/{bare}" for each in claims)
    word = claims[0].slot.name.replace("_", " ")
    return ConfigError(f"{place}{len(claims)} plugins offer a {word} called {bare!r}: {owners}; write {names}")
