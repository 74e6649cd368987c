"""What all commands have in common: MODEL, a flag for each setting, and errors without tracebacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal

import click

from ..hooks import config
from ..hooks.config import Setting, Sources
from ..hooks.errors import ConfigError, HeadraceError

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

CONFIG_FILE: Final = Path("headrace.toml")
EXIT_CONFIG: Final = 2
OTHER_FLAGS: Final = {"model.name": ("--served-model-name",)}
"""Further names of flags, for those who come from other servers."""


def with_settings(
    *sections: str,
    model: Literal["argument", "option", "none"] = "argument",
    using: Callable[[Sources], object] = lambda sources: config.checked(config.merged(sources)),
) -> Decorator:
    """Give a command MODEL and the flags of *sections*; it is called with `loaded`.

    Args:
        using: what makes `loaded` of the sources: by default the checked settings, as a `Loaded`.

    Errors that have a message for the operator end it with that message: exit code 2 for the configuration, else 1.
    """
    chosen = {_variable(setting): setting for setting in config.flags() if _belongs(setting, sections)}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(
            config_file: Path | None,
            profiles: tuple[str, ...],
            sets: tuple[str, ...],
            model: str | None = None,
            **values: Any,
        ) -> None:
            given = {"model.uri": model} if model is not None else {}
            for name, setting in chosen.items():
                value = values.pop(name)
                if value is not None:
                    given[setting.key] = str(value).lower() if isinstance(value, bool) else value
            with _clear_errors():
                command(loaded=using(_sources(config_file, given, sets, profiles)), **values)

        options = [_option(*item) for item in reversed(chosen.items())]
        decorated: Command = run
        for option in (*options, _SETS, _PROFILES, _FILE, *_MODEL[model]):
            decorated = option(decorated)
        return decorated

    return decorate


_MODEL: Final[dict[str, tuple[Decorator, ...]]] = {
    "argument": (click.argument("model", required=False, metavar="[MODEL]"),),
    "option": (click.option("-m", "--model", metavar="MODEL", help="The model, as other commands take it."),),
    "none": (),
}
_FILE: Final[Decorator] = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help=f"A file of settings; {CONFIG_FILE} is read if it is there.",
)
_PROFILES: Final[Decorator] = click.option(
    "--profile", "profiles", multiple=True, help="A named set of settings; may be repeated."
)
_SETS: Final[Decorator] = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any setting, such as line.max_running=32; repeatable."
)


def _option(name: str, setting: Setting) -> Decorator:
    if setting.is_switch:
        off = "--no-" + setting.flag.removeprefix("--")
        return click.option(f"{setting.flag}/{off}", name, default=None, help=setting.description)
    flags = (setting.flag, *OTHER_FLAGS.get(setting.key, ()))
    return click.option(*flags, name, metavar=setting.key.rpartition(".")[2].upper(), help=setting.description)


def _belongs(setting: Setting, sections: tuple[str, ...]) -> bool:
    # MODEL is the flag of model.uri.
    return setting.key.partition(".")[0] in sections and setting.key != "model.uri"


def _variable(setting: Setting) -> str:
    return "setting_" + setting.key.replace(".", "_")


def _sources(file: Path | None, given: dict[str, str], sets: tuple[str, ...], profiles: tuple[str, ...]) -> Sources:
    if file is None and CONFIG_FILE.exists():
        file = CONFIG_FILE
    return Sources(file=file, environ=os.environ, flags=given, sets=sets, profiles=profiles)


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)
    except HeadraceError as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(1)
