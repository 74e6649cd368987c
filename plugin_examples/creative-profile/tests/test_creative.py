import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from headrace.hooks.config import load
from headrace.hooks.profiles import GROUP
from headrace.testing import ProfileContract

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
ENTRIES = [EntryPoint(name, value, GROUP) for name, value in PROJECT["entry-points"][GROUP].items()]


class TestProfile(ProfileContract):
    profile = "creative"
    entry_points = ENTRIES


def loaded(**sources):
    return load(profiles=["creative"], profile_entry_points=ENTRIES, **sources)


def test_its_settings_pass_the_check_and_say_where_they_come_from():
    found = loaded()
    assert found.settings.sampling.defaults["temperature"] == 1.2
    assert found.origin("sampling.defaults.min_p").startswith("profile creative:")


def test_the_file_of_the_operator_goes_over_it(tmp_path):
    file = tmp_path / "headrace.toml"
    file.write_text("[sampling.defaults]\ntemperature = 0.9\n")
    assert loaded(file=file).settings.sampling.defaults == {"temperature": 0.9, "min_p": pytest.approx(0.05)}
