import sys

import pytest

from headrace.hooks.config import load
from headrace.hooks.errors import ConfigError


@pytest.fixture
def profiles(site):
    """Installs profiles, name → TOML, as data of one package that must not be imported."""

    def install(distribution="acme", **texts):
        package = site.path / f"{distribution}_profiles"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('a profile was imported')")
        for name, text in texts.items():
            (package / f"{name}.toml").write_text(text)
        points = {name: f"{package.name}:{name}.toml" for name in texts}
        site.install(distribution, group="headrace.profiles", points=points)
        return site.entry_points("headrace.profiles")

    return install


def problem(**sources):
    with pytest.raises(ConfigError) as error:
        load(**sources)
    return str(error.value)


def test_a_profile_lies_over_the_defaults_and_under_everything_else(profiles):
    points = profiles(small="[line]\nmax_running = 2\nmax_waiting = 2\n")
    loaded = load(profiles=["small"], environ={"HEADRACE__LINE__MAX_WAITING": "3"}, profile_entry_points=points)
    assert (loaded.settings.line.max_running, loaded.settings.line.max_waiting) == (2, 3)
    assert loaded.origin("line.max_running") == "profile small:2:1"
    assert loaded.settings.profile == ("small",)


def test_a_profile_is_read_without_importing_its_package(profiles):
    points = profiles(small="[line]\nmax_running = 2\n")
    load(profiles=["small"], profile_entry_points=points)
    assert "acme_profiles" not in sys.modules


def test_later_profiles_win(profiles):
    points = profiles(a="[line]\nmax_running = 1\nmax_waiting = 1\n", b="[line]\nmax_running = 2\n")
    line = load(profiles=["a", "b"], profile_entry_points=points).settings.line
    assert (line.max_running, line.max_waiting) == (2, 1)


@pytest.mark.parametrize(
    ("sources", "running"),
    [
        ({}, 1),
        ({"environ": {"HEADRACE__PROFILE": "b"}}, 2),
        ({"environ": {"HEADRACE__PROFILE": "b"}, "profiles": ["a"]}, 1),
        ({"sets": ["profile=b"]}, 2),
    ],
)
def test_the_highest_source_that_names_profiles_decides(profiles, tmp_path, sources, running):
    points = profiles(a="[line]\nmax_running = 1\n", b="[line]\nmax_running = 2\n")
    file = tmp_path / "headrace.toml"
    file.write_text('profile = ["a"]')
    assert load(file=file, profile_entry_points=points, **sources).settings.line.max_running == running


def test_a_profile_may_name_others_that_lie_under_it(profiles):
    points = profiles(
        top='profile = ["base"]\n[line]\nmax_running = 2\n', base="[line]\nmax_running = 1\nmax_waiting = 1\n"
    )
    loaded = load(profiles=["top"], profile_entry_points=points)
    assert (loaded.settings.line.max_running, loaded.settings.line.max_waiting) == (2, 1)
    assert loaded.settings.profile == ("top",)


def test_profiles_in_a_circle_are_refused(profiles):
    points = profiles(a='profile = ["b"]', b='profile = ["a"]')
    assert problem(profiles=["a"], profile_entry_points=points) == (
        "profile b:1:1: profile.0: profiles name each other in a circle: a → b → a"
    )


def test_an_unknown_profile_suggests_one(profiles):
    points = profiles(creative="", strict="")
    assert problem(profiles=["creativ"], profile_entry_points=points) == (
        "--profile: profile.0: no profile called 'creativ'; did you mean creative? (installed: creative, strict)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[plugins]\nallow = ['acme']",
        "[plugins]\nstrict = false",
        "[server]\nhost = '0.0.0.0'",
        "[server]\nport = 80",
        "[server]\ncors_origins = ['*']",
    ],
)
def test_a_profile_cannot_widen_trust(profiles, text):
    message = problem(profiles=["wide"], profile_entry_points=profiles(wide=text))
    assert message.startswith("profile wide:")
    assert message.endswith("not allowed in a profile; set it in headrace.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[line]\nmax_runing = 1", "profile odd:2:1: line.max_runing: unknown; did you mean max_running?"),
        ("[line", "profile odd:1:6: not TOML: "),
        ("profile = 3", "profile odd:1:1: profile: must be array of text, got 3"),
    ],
)
def test_what_is_wrong_in_a_profile_has_its_place(profiles, text, message):
    assert problem(profiles=["odd"], profile_entry_points=profiles(odd=text)).startswith(message)


def test_a_profile_whose_file_is_gone_is_an_error(profiles, site):
    points = profiles(gone="")
    (site.path / "acme_profiles" / "gone.toml").unlink()
    assert "profile 'gone' (acme_profiles:gone.toml) cannot be read: " in problem(
        profiles=["gone"], profile_entry_points=points
    )


def test_a_profile_name_that_two_distributions_bring_is_an_error(profiles):
    profiles("acme", small="")
    points = profiles("other", small="")
    assert "two distributions bring a profile called 'small': acme and other" in problem(
        profiles=["small"], profile_entry_points=points
    )
