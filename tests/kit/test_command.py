"""The contract of commands: what it lets pass, and what it catches."""

from __future__ import annotations

import click
import pytest

from headrace.hooks.testing.contract import run
from tests.kit.faults import contract_of, failures, plugin_of


@click.command()
@click.option("--name", default="world")
def hello(name):
    """Say hello."""
    click.echo(f"hello {name}")


@click.command()
def mute():
    click.echo("hello")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("rest", nargs=-1)
def lax(rest):
    """Take anything."""


def giving(command):
    return type("Command", (), {"command": lambda self: command})


class Loud:
    def command(self):
        click.echo("here I am")
        return hello


class Once:
    """Fails when it is run again."""

    ran = False

    def command(self):
        @click.command()
        @click.option("--name")
        def run(name):
            """Run once."""
            if Once.ran:
                raise click.ClickException("ran already")
            Once.ran = True

        return run


RUNS = [((), 0, "hello world"), (("--name", "mill"), 0, "hello mill")]
FAULTS = [
    ("test_it_is_a_command_of_a_name_of_its_own", giving(hello.callback)),
    ("test_it_has_help", giving(mute)),
    ("test_asking_for_it_runs_nothing", Loud),
    ("test_a_wrong_option_is_refused", giving(lax)),
    ("test_it_ends_as_it_should", giving(mute)),
    ("test_a_second_run_ends_as_the_first", Once),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("command", giving(hello), runs=RUNS)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("command", component, runs=RUNS), [test])


def test_a_command_called_as_one_of_ours_is_caught():
    test = "test_it_is_a_command_of_a_name_of_its_own"
    tried = contract_of("command", giving(hello))
    tried.plugin, tried.name = plugin_of("command", lambda context, options: giving(hello)(), called="serve"), "serve"
    assert test in failures(tried, [test])
