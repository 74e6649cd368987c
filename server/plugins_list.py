"""What is installed, what it offers, and in which order the configured logits processors run."""

from __future__ import annotations

from collections.abc import Iterator

from ..hooks.components import Component, PluginInfo
from ..hooks.config import Loaded
from ..hooks.decode import did_you_mean
from ..hooks.errors import ConfigError, StartError
from ..hooks.protocols import Context, SamplingContext
from ..hooks.registry import Registry


def registry_of(loaded: Loaded) -> Registry:
    """Every installed plugin, under this configuration.

    Raises:
        ConfigError: it names plugins that are not there.
    """
    chosen = loaded.settings.plugins
    where = loaded.where("plugins")
    return Registry.discover(disable=chosen.disable, allow=chosen.allow, strict=chosen.strict, where=where)


def listing(registry: Registry) -> Iterator[str]:
    """A line for each plugin."""
    for info in registry.report():
        yield f"{info.id:<20} {info.state:<8} {info.origin:<20} {_notes(info)}"


def order(loaded: Loaded, registry: Registry) -> list[str]:
    """The phases of the configured chain in running order, each with its processors, and the draw."""
    from ..hooks.chain import build_sampling

    # Phases do not depend on the model, so the smallest one will do.
    context = Context(sampling=SamplingContext(vocab_size=8, num_slots=1))
    try:
        chain, sampler = build_sampling(registry, loaded.settings.sampling, context, loaded.where("sampling"))
    except StartError as error:
        return ["the configured logits processors cannot run:", *(f"  {line}" for line in str(error).splitlines())]
    rows: list[tuple[str, str]] = [
        (phase, " → ".join(_name(each.plugin, each.name) for each in bounds)) for phase, bounds in chain
    ]
    rows.append(("draw", _name(sampler.plugin, sampler.name)))
    return ["order of sampling:", *(f"  {phase:<12} {names or '–'}" for phase, names in rows)]


def find(registry: Registry, name: str, slot: str | None) -> Component:
    """The component that somebody means by *name*: its own name, `plugin/name`, or a plugin that offers just one.

    Raises:
        ConfigError: none, or several in different slots.
    """
    from ..hooks.slots import SLOTS

    offered = [each for known in SLOTS for each in registry.offered(known) if slot in (None, known)]
    owner, _, bare = name.rpartition("/")
    found = [each for each in offered if each.name == bare and owner in ("", each.plugin.id)]
    found = found or [each for each in offered if each.plugin.id == name]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(f"{each.plugin.id}/{each.name} ({each.slot.name})" for each in found)
        raise ConfigError(f"{name!r} may be {choices}; write plugin/name, and --slot where that is not enough")
    for info in registry.report():
        if info.id == name and info.reason:
            raise ConfigError(f"plugin {info} is not loaded: {info.reason}; see `headrace plugins doctor`")
    names = [*(each.name for each in offered), *(each.plugin.id for each in offered)]
    filling = f" that fills {slot}" if slot else ""
    raise ConfigError(f"no component called {name!r}{filling} is installed{did_you_mean(name, names)}")


def _notes(info: PluginInfo) -> str:
    offers = ", ".join(f"{slot}: {' '.join(names)}" for slot, names in info.slots.items())
    withheld = f"plugins.allow lacks it for {', '.join(info.withheld)}" if info.withheld else ""
    return "; ".join(filter(None, (offers, info.reason, withheld)))


def _name(plugin: str, name: str) -> str:
    return name if plugin == name else f"{plugin}/{name}"
