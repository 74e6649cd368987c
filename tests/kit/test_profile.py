"""The contract of profiles: what it lets pass, and what it catches."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.metadata import EntryPoint

import pytest

from headrace.hooks.profiles import GROUP
from headrace.hooks.testing.contract import promises_of, run
from headrace.testing import ProfileContract
from tests.kit.faults import failures

GOOD = """
[line]
max_running = 32
[sampling]
defaults = { temperature = 1.2, min_p = 0.05 }
extra_processors = [{ use = "dry", options = { multiplier = 0.8 } }]
sampler = { use = "mirostat", options = { tau = 3.0 } }
"""

FAULTS = [
    ("test_it_is_installed_once_and_says_something", "[line"),
    ("test_it_is_installed_once_and_says_something", "# nothing yet"),
    ("test_its_settings_are_known_and_within_their_limits", "[line]\nmax_runing = 3"),
    ("test_its_settings_are_known_and_within_their_limits", "[line]\nmax_running = 0"),
    ("test_its_settings_are_known_and_within_their_limits", "[sampling]\ndefaults = { temprature = 1.0 }"),
    ("test_its_settings_are_known_and_within_their_limits", 'profile = ["not there"]'),
    ("test_it_widens_no_trust", "[server]\nhost = '0.0.0.0'"),
    ("test_it_widens_no_trust", "[plugins]\nallow = ['acme']"),
    (
        "test_its_components_are_installed_and_take_their_options",
        "[sampling]\nextra_processors = ['no-such-processor']",
    ),
    (
        "test_its_components_are_installed_and_take_their_options",
        "[sampling]\nextra_processors = [{ use = 'dry', options = { multiplyer = 0.8 } }]",
    ),
    ("test_an_operator_can_change_each_of_its_settings", "[line]\nmax_step_tokens = 16\nmax_running = 16"),
]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The contract of a profile with a text, in a package that must not be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text, *, value="kit_profiles:mine.toml", copies=1):
        folder = tmp_path / value.partition(":")[0].replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kit_profiles" / "__init__.py").write_text("")
        (folder / "mine.toml").write_text(text)
        entries = [EntryPoint("mine", value, GROUP)] * copies
        return type("TestMine", (ProfileContract,), {"profile": "mine", "entry_points": entries})

    yield make
    sys.modules.pop("kit_profiles", None)


def test_a_good_one_keeps_every_promise(made):
    assert set(run(made(GOOD)).values()) == {None}


def test_one_in_a_package_inside_another_keeps_every_promise(made):
    assert failures(made(GOOD, value="kit_profiles.inner:mine.toml")) == {}


@pytest.mark.parametrize(("test", "text"), FAULTS)
def test_a_planted_fault_is_caught(made, test, text):
    assert test in failures(made(text), [test])


def test_two_of_a_name_are_caught(made):
    assert "test_it_is_installed_once_and_says_something" in failures(made(GOOD, copies=2))


def test_one_that_is_not_there_is_caught(made):
    tried = made(GOOD)
    tried.profile = "other"
    assert "test_it_is_installed_once_and_says_something" in failures(tried)


def test_a_package_that_runs_when_it_is_looked_for_is_caught(made, monkeypatch):
    class Eager(MetaPathFinder):
        looking = False

        def find_spec(self, name, path, target=None):
            if name == "kit_profiles" and not self.looking:
                self.looking = True
                import_module(name)
                self.looking = False

    tried = made(GOOD)
    monkeypatch.setattr(sys, "meta_path", [Eager(), *sys.meta_path])
    assert list(failures(tried)) == ["test_reading_it_runs_no_code"]


def test_each_promise_has_a_planted_fault():
    source = inspect.getsource(sys.modules[__name__])
    assert [promise for promise in promises_of(ProfileContract) if promise not in source] == []
