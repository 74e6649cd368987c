"""`headrace plugins`: what is installed besides Headrace itself, why some of it is not loaded, and a start for more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ..hooks.config import Loaded
from ..hooks.errors import StartError
from ..hooks.slots import SLOTS
from .options import with_settings


@click.group()
def plugins() -> None:
    """What is installed besides Headrace itself, and what is in it."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@with_settings("plugins", model="none")
def list_plugins(loaded: Loaded, as_json: bool) -> None:
    """Show every plugin, what it offers, and the order in which the configured logits processors run."""
    import msgspec

    from .plugins_list import listing, order, registry_of

    registry = registry_of(loaded)
    # The order first: what it selects is shown as such.
    phases = order(loaded, registry)
    if as_json:
        for info in registry.report():
            click.echo(msgspec.json.encode(info))
        return
    for line in (*listing(registry), "", *phases):
        click.echo(line)


@plugins.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server that shall reload.")
def reload(url: str) -> None:
    """Have a running server read its configuration and its plugins anew. The key stands in HEADRACE_API_KEY.

    New requests are answered by what it finds; those that run are finished as they began.
    """
    from .reload import ask

    try:
        for line in ask(url, dict(os.environ)):
            click.echo(line)
    except StartError as error:
        raise click.ClickException(str(error)) from None


@plugins.command()
@with_settings("model", "line", "sampling", "server", "plugins", model="option")
def doctor(loaded: Loaded) -> None:
    """Say why plugins are not loaded or not chosen, and what would mend it. Ends with 1 where something is wrong."""
    from .plugins_doctor import examine

    healthy = True
    for finding in examine(loaded):
        healthy = healthy and finding.ok
        click.echo(finding)
    sys.exit(0 if healthy else 1)


@plugins.command()
@click.argument("name")
@click.option("--slot", type=click.Choice(sorted(SLOTS)), required=True, help="What the plugin fills.")
@click.option(
    "--into", type=click.Path(path_type=Path), default=Path(), help="The folder it goes into; by default this one."
)
def new(name: str, slot: str, into: Path) -> None:
    """Write a project called NAME that fills a slot, installs, and passes its contract."""
    from .plugins_new import write

    try:
        folder = write(name, slot, into)
    except StartError as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{folder} is a plugin for the slot {slot}. To go on:\n\n"
        f"    cd {folder}\n    pip install -e '.[test]'\n    pytest\n    headrace plugins list\n"
    )


@plugins.command()
@click.argument("name")
@click.option("--slot", type=click.Choice(sorted(SLOTS)), help="Where NAME fills several.")
@click.option("--options", default="{}", help="Its options, as a TOML inline table.")
@click.option("--params", default="{}", help="What a request asks of it, as a TOML inline table.")
@with_settings("plugins", model="none")
def check(loaded: Loaded, name: str, slot: str | None, options: str, params: str) -> None:
    """Run the contract of component NAME, through pytest. Ends as pytest does."""
    from .plugins_check import check as run_contract

    sys.exit(run_contract(loaded, name, slot, options, params))


@plugins.command()
@click.argument("name")
@click.option("--slot", type=click.Choice(sorted(SLOTS)), help="Where NAME fills several.")
@click.option("--vocab-size", default=49152, show_default=True, help="Width of the rows of logits.")
@click.option("--options", default="{}", help="Its options, as a TOML inline table.")
@click.option("--params", default="{}", help="What a request asks of it, as a TOML inline table.")
@click.option("--seconds", default=0.2, show_default=True, help="How long to measure each row of the table.")
@with_settings("plugins", model="none")
def bench(
    loaded: Loaded, name: str, slot: str | None, vocab_size: int, options: str, params: str, seconds: float
) -> None:
    """Measure what one call of a logits processor, sampler or scheduler policy costs."""
    from .plugins_bench import bench as measure

    for line in measure(loaded, name, slot, vocab_size=vocab_size, options=options, params=params, seconds=seconds):
        click.echo(line)
