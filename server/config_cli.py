"""`headrace config`: what the settings are, who said so, and what is wrong with them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..hooks.config import Loaded, Merged, checked
from ..hooks.decode import Problem
from ..hooks.errors import ConfigError
from ..hooks.origins import Where
from .options import EXIT_CONFIG, with_settings

if TYPE_CHECKING:
    from ..hooks.choices import Chosen
    from ..hooks.registry import Registry

SECTIONS = ("model", "line", "sampling", "server", "plugins")


@click.group("config")
def config() -> None:
    """What the settings are, who said so, and what is wrong with them."""


@config.command()
@click.option("--origin", "with_origin", is_flag=True, help="Say where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: key, value, origin.")
@with_settings(*SECTIONS, model="option")
def show(loaded: Loaded, with_origin: bool, as_json: bool) -> None:
    """Print every setting; without flags, as a configuration file that says the same."""
    from ..hooks.config_show import as_toml, lines

    for line in lines(loaded):
        if as_json:
            click.echo(json.dumps({"key": line.key, "value": line.value, "origin": line.origin}, ensure_ascii=False))
            continue
        text = f"{line.key} = {as_toml(line.value)}" if line.value is not None else f"# {line.key} is unset"
        click.echo(f"{text:<60}  # {line.origin}" if with_origin else text)


@config.command()
@with_settings(*SECTIONS, model="option", using=lambda sources: sources)
def check(loaded: Any) -> None:
    """Check all settings and every choice of a component, without a model. Ends with 2 where something is wrong."""
    from ..hooks.config import merged

    everything = merged(loaded)
    problems, chosen = examine(everything)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        sys.exit(EXIT_CONFIG)
    file = loaded.file or Path("no file")
    click.echo(f"{file}: right; {len(chosen)} components are chosen")


def examine(everything: Merged) -> tuple[list[str], list[Chosen]]:
    """All that is wrong, in the order of the places, and what is chosen."""
    from ..hooks.choices import examine as examine_choices

    lines: list[str] = []
    try:
        checked(everything)
    except ConfigError as error:
        lines += str(error).splitlines()
    problems: list[Problem] = []
    root = Where((), everything.origins)
    chosen: list[Chosen] = []
    try:
        registry = _registry(everything.values, root)
    except ConfigError as error:
        lines += str(error).splitlines()
    else:
        chosen = examine_choices(registry, everything.values, root, problems)
    return [*dict.fromkeys([*lines, *map(str, problems)])], chosen


def _registry(values: Mapping[str, Any], root: Where) -> Registry:
    from ..hooks.registry import Registry

    plugins = values["plugins"] if isinstance(values["plugins"], Mapping) else {}
    return Registry.discover(
        disable=_texts(plugins.get("disable")),
        allow=_texts(plugins.get("allow")),
        strict=plugins.get("strict") is True,
        environ=os.environ,
        where=root / "plugins",
    )


def _texts(value: Any) -> list[str]:
    return [item for item in _items(value) if isinstance(item, str)]


def _items(value: Any) -> Iterator[Any]:
    return iter(value if isinstance(value, list | tuple) else ())
