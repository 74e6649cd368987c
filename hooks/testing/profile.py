"""The contract of a profile: settings under a name, that are known, lie under the operator's, and run no code."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import msgspec

from ..choices import examine
from ..config import Loaded, Settings, load
from ..config_show import as_toml
from ..decode import Problem
from ..errors import ConfigError
from ..layers import Layer
from ..origins import Where
from ..profiles import GROUP, Profiles
from ..registry import Registry
from ..settings import NOT_IN_PROFILES
from .contract import ensure


class ProfileContract:
    """Reads the profile as the engine does. It has no component, so it shares nothing with the other contracts.

    Attributes:
        profile: the name of its entry point, as `--profile` takes it.
        entry_points: of profiles, where they are not installed; None: look.
    """

    profile: ClassVar[str] = ""
    entry_points: ClassVar[Sequence[EntryPoint] | None] = None

    def layer(self) -> Layer:
        """What its file says.

        Raises:
            Broken: it is not there, or no TOML.
        """
        problems: list[Problem] = []
        layer = Profiles(self._entries()).read(self.profile, Where(("profile",)), problems)
        ensure(not problems, "; ".join(map(str, problems)))
        return layer

    def loaded(self, file: Path | None = None) -> Loaded:
        """The settings with this profile, and over it a configuration file."""
        return load(file=file, profiles=[self.profile], profile_entry_points=self._entries())

    def test_it_is_installed_once_and_says_something(self) -> None:
        """Under a name that no other distribution has; a file of TOML, in UTF-8."""
        ensure(self.layer().values, f"profile {self.profile} must set something, its file is empty")

    def test_its_settings_are_known_and_within_their_limits(self) -> None:
        """Alone, over the defaults, and with the profiles that it builds on."""
        self.layer()
        problem = self._problem(None)
        ensure(problem is None, f"the settings must pass the check: {problem}")

    def test_it_widens_no_trust(self) -> None:
        """Choosing a preset must not open a port, take a plugin in or let anybody in."""
        values = self.layer().values
        found = [key for key in NOT_IN_PROFILES if _get(values, key) is not None]
        ensure(not found, f"a profile must leave {', '.join(found)} to headrace.toml")

    def test_its_components_are_installed_and_take_their_options(self) -> None:
        """Nothing is built. Install what it needs beside it: its distribution should depend on that."""
        loaded, problems = self.loaded(), list[Problem]()
        values = msgspec.to_builtins(loaded.settings, enc_hook=int)
        examine(Registry.discover(environ={}), values, Where((), loaded.origins), problems)
        ensure(not problems, "; ".join(map(str, problems)))

    def test_an_operator_can_change_each_of_its_settings(self) -> None:
        """`headrace.toml` goes over it: also where it sets but one of them back to its default."""
        defaults = msgspec.to_builtins(Settings(), enc_hook=int)
        for key, value in _leaves(self.layer().values):
            default = _get(defaults, key)
            value = value if default is None else default
            text = f"{key} = {as_toml(value)}\n"
            problem = self._problem(text, f"{key}.use" if isinstance(value, Mapping) and "use" in value else key)
            ensure(problem is None, f"a configuration file with {text.strip()} must work over it: {problem}")

    def test_reading_it_runs_no_code(self) -> None:
        """Not even that of the package it lies in."""
        found = [entry for entry in self._entries() if entry.name == self.profile]
        roots = {entry.module.partition(".")[0] for entry in found} - {__name__.partition(".")[0]}
        known = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in roots}
        try:
            self._problem(None)
            ran = sorted(name for name in sys.modules if name.partition(".")[0] in roots)
        finally:
            sys.modules.update(known)
        ensure(not ran, f"a profile must be read without an import, found {', '.join(ran)} imported")

    def _entries(self) -> Sequence[EntryPoint]:
        return tuple(entry_points(group=GROUP)) if self.entry_points is None else self.entry_points

    def _problem(self, text: str | None, key: str = "") -> str | None:
        """What is wrong with the settings under a configuration file of that *text*.

        Args:
            key: what the file sets.
        """
        try:
            if text is None:
                self.loaded()
                return None
            with TemporaryDirectory() as folder:
                file = Path(folder) / "headrace.toml"
                file.write_text(text, encoding="utf-8")
                origin = self.loaded(file).origin(key)
        except ConfigError as error:
            return str(error)
        return None if origin.startswith(str(file)) else f"{key} comes from {origin}"


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What is set, by its dotted key; a component with its options is one."""
    for name, value in values.items():
        here = (*path, name)
        if isinstance(value, Mapping) and "use" not in value:
            yield from _leaves(value, here)
        elif here != ("profile",):
            yield ".".join(here), value


def _get(values: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return None
        values = values[part]
    return values
