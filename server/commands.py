"""What plugins add to the command line. It widens whom we trust: their distribution must stand in `plugins.allow`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ..hooks import config
from ..hooks.errors import PluginError, StartError
from ..hooks.protocols import Context
from ..hooks.registry import Registry
from .options import CONFIG_FILE, EXIT_CONFIG

if TYPE_CHECKING:
    from ..hooks.components import Component


class Commands(click.Group):
    """The commands of Headrace and, after them, those of plugins that `plugins.allow` names.

    Which plugins those are is read from headrace.toml and the environment, for flags belong to commands.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = super().list_commands(ctx)
        try:
            return [*own, *sorted({each.name for each in _commands()} - set(own))]
        except Failed:  # Help must be had with a configuration that is wrong, too.
            return own

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        for component in _commands():
            if component.name == cmd_name:
                return _command(component)
        return None


def _commands() -> Iterator[Component]:
    """The commands that plugins offer. Nothing is looked for where no plugin may have one."""
    try:
        settings = config.load(file=CONFIG_FILE if CONFIG_FILE.exists() else None, environ=os.environ).settings
        if settings.plugins.allow:
            plugins = settings.plugins
            registry = Registry.discover(disable=plugins.disable, allow=plugins.allow, strict=plugins.strict)
            yield from registry.offered("command")
    except StartError as error:
        raise Failed(str(error)) from None


def _command(component: Component) -> click.Command:
    try:
        command = component.build(Context()).component.command()
        if not isinstance(command, click.Command):
            reason = f"command {component.name} must give a click.Command, got {type(command).__name__}"
            raise PluginError(component.plugin.id, reason, distribution=component.plugin.origin)
    except StartError as error:
        raise Failed(str(error)) from None
    return command


class Failed(click.ClickException):
    """A plugin's command that cannot be had."""

    exit_code = EXIT_CONFIG
