"""Why plugins are not loaded or not chosen, and what would mend it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Final

import msgspec

from ..hooks.choices import examine as examine_choices
from ..hooks.components import PluginInfo
from ..hooks.config import Loaded
from ..hooks.decode import Problem
from ..hooks.discovery import GROUP, builtin, normal
from ..hooks.origins import Where
from ..hooks.profiles import GROUP as PROFILES
from ..hooks.registry import Registry
from ..hooks.slots import PROJECT, SLOTS
from .doctor import Finding
from .plugins_list import registry_of

CURES: Final = (
    (r"disabled by plugins\.disable", "take {id} out of plugins.disable"),
    (r"switched off by HEADRACE_PLUGINS", "unset HEADRACE_PLUGINS, or add {id} to it"),
    (r"plugins\.strict is set", "add {distribution} to plugins.allow, if you trust it"),
    (r"distributions bring a plugin of this name", "uninstall all but one, or name the others in plugins.disable"),
    (r"its headrace_api is", "install a version of {distribution} that was made for this Headrace"),
    (r"there is no hook", "its author must rename the function; docs/plugins/slots.md has the names"),
    (r"it has no hook", "its author must mark the function with @headrace.plugin"),
    (r"hookimpl|must be a plain function", "its author must write `def register_SLOT(register): …`"),
    (r"No module named '(?P<module>[^'.]+)", "install what brings the module {module}, or {distribution} itself again"),
    (r"cannot be imported", "report this to the author of {distribution}, or disable it: plugins.disable = ['{id}']"),
    (r"register_\w+: ", "report this to the author of {distribution}, or disable it: plugins.disable = ['{id}']"),
)
"""What a reason looks like → what would mend it."""


def examine(loaded: Loaded) -> Iterator[Finding]:
    """All findings: plugins that are not loaded or not whole, choices that fail, packages without effect."""
    registry = registry_of(loaded)
    infos = registry.report()
    working = [info for info in infos if info.state not in ("failed", "skipped")]
    yield Finding(what="plugins", text=f"{len(working)} of {len(infos)} loaded, from {_num_distributions(infos)}")
    for info in infos:
        yield from _plugin(info)
    yield from _claims(registry)
    yield from _chosen(loaded, registry)
    yield from _without_entry_points(infos)


def cure(info: PluginInfo) -> str:
    """What would mend the plugin; "" where only its reason can say."""
    for pattern, text in CURES:
        if match := re.search(pattern, info.reason):
            return text.format(id=info.id, distribution=info.distribution or info.id, **match.groupdict())
    return ""


def _plugin(info: PluginInfo) -> Iterator[Finding]:
    if info.state in ("failed", "skipped"):
        advice = cure(info)
        text = f"{info.state}: {info.reason}" + (f"\nto mend it: {advice}" if advice else "")
        yield Finding(what=f"plugin {info}", text=text, ok=info.state == "skipped")
    if info.withheld:
        slots = ", ".join(info.withheld)
        text = f"may not fill {slots}\nto mend it: add {info.distribution} to plugins.allow, if you trust it"
        yield Finding(what=f"plugin {info}", text=text)


def _claims(registry: Registry) -> Iterator[Finding]:
    """Names that two plugins offer: each can be chosen by its full name only."""
    for slot in SLOTS:
        offered = registry.offered(slot)
        for name in dict.fromkeys(each.name for each in offered):
            owners = [each for each in offered if each.name == name]
            if len({each.plugin.id for each in owners} - {each.replaces for each in owners}) > 1:
                full = " or ".join(f"{each.plugin.id}/{name}" for each in owners)
                yield Finding(what="name", text=f"{len(owners)} plugins offer the {slot} {name}: choose {full}")


def _chosen(loaded: Loaded, registry: Registry) -> Iterator[Finding]:
    """Choices of the configuration that cannot be found, and options that do not fit them."""
    problems: list[Problem] = []
    examine_choices(registry, msgspec.to_builtins(loaded.settings, enc_hook=int), Where((), loaded.origins), problems)
    for problem in problems:
        yield Finding(what="chosen", text=str(problem), ok=False)


def _without_entry_points(infos: tuple[PluginInfo, ...]) -> Iterator[Finding]:
    """Distributions that call themselves Headrace's and offer nothing that it finds."""
    offering = {normal(info.distribution) for info in infos}
    for dist in metadata.distributions():
        name = normal(dist.name or "")
        if not name.startswith(f"{PROJECT}-") or name in offering:
            continue
        groups = {entry.group for entry in dist.entry_points if entry.group.startswith(PROJECT)}
        if PROFILES in groups:
            continue
        found = f"entry points in {', '.join(sorted(groups))} only" if groups else "no entry point"
        text = f'is installed and has {found}; its pyproject.toml needs [project.entry-points."{GROUP}"]'
        yield Finding(what=f"package {dist.name}", text=text)


def _num_distributions(infos: tuple[PluginInfo, ...]) -> str:
    others = {info.distribution for info in infos if not builtin(info)}
    hint = f", HEADRACE_PLUGINS={os.environ['HEADRACE_PLUGINS']}" if "HEADRACE_PLUGINS" in os.environ else ""
    return f"Headrace and {len(others)} other distributions{hint}"
