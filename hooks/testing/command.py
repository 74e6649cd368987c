"""The contract of the slot `command`: a subcommand with its help, that ends as commands do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import chdir
from tempfile import TemporaryDirectory
from typing import ClassVar

import click
from click.testing import CliRunner, Result

from .contract import Contract, ensure, skip

OURS = ("bench", "config", "doctor", "plan", "plugins", "serve", "version")


class CommandContract(Contract):
    """Runs the command, as `headrace NAME …` would.

    Attributes:
        runs: of calls to try: (arguments, exit code, what the output contains).
    """

    slot = "command"
    runs: ClassVar[Sequence[tuple[Sequence[str], int, str]]] = ()

    def ran(self, *arguments: str) -> Result:
        """What came of one call, in an empty folder."""
        with TemporaryDirectory() as folder, chdir(folder):
            return CliRunner().invoke(self.command(), list(arguments), prog_name=f"headrace {self.entry().name}")

    def command(self) -> click.Command:
        """The click command."""
        found = self.build().command()
        ensure(isinstance(found, click.Command), f"command must return a click.Command, found {found!r}")
        command: click.Command = found
        return command

    def test_it_is_a_command_of_a_name_of_its_own(self) -> None:
        self.command()
        name = self.entry().name
        ensure(name not in OURS, f"the name must be none of headrace's own ({', '.join(OURS)}), found {name}")

    def test_it_has_help(self) -> None:
        """A sentence on what it does, and one on each option."""
        command = self.command()
        ensure(command.get_short_help_str(), "it must say in a sentence what it does (help=, or its docstring)")
        found = self.ran("--help")
        ensure(found.exit_code == 0, f"--help must exit with 0, found {found.exit_code}: {found.output}")
        ensure("Usage:" in found.output, f"--help must show how it is called, found {found.output!r}")

    def test_asking_for_it_runs_nothing(self) -> None:
        """`headrace --help` asks every plugin for its command."""
        said: list[str] = []

        @click.command()
        def ask() -> None:
            for _ in range(2):
                self.command()

        said.append(CliRunner().invoke(ask, catch_exceptions=False).output)
        ensure(said == [""], f"command must print nothing, found {said[0]!r}")

    def test_a_wrong_option_is_refused(self) -> None:
        found = self.ran("--no-such-option-anywhere")
        ensure(found.exit_code == 2, f"an unknown option must exit with 2, found {found.exit_code}")

    def test_it_ends_as_it_should(self) -> None:
        if not self.runs:
            skip("set runs = [(arguments, exit code, what the output contains), …]")
        for arguments, code, content in self.runs:
            found = self.ran(*arguments)
            said = f"{' '.join(arguments) or 'no arguments'}: {found.output!r} {found.exception or ''}"
            ensure(found.exit_code == code, f"it must exit with {code}, found {found.exit_code} with {said}")
            ensure(content in found.output, f"its output must contain {content!r}, found with {said}")

    def test_a_second_run_ends_as_the_first(self) -> None:
        for arguments, _, _ in self.runs:
            first, second = self.ran(*arguments), self.ran(*arguments)
            ensure(first.exit_code == second.exit_code, f"a second run must exit with {first.exit_code}, as the first")
