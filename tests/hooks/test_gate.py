"""Which installed plugins may load, and which may fill the slots that widen trust."""

import pytest

from headrace.hooks.errors import ConfigError
from headrace.hooks.registry import Registry

SOURCE = """
@plugin
def register_observer(register): register("NAME", print)
"""
ROUTES = """
@plugin
def register_routes(register): register("admin", print)
@plugin
def register_sampler(register): register("dice", print)
"""


@pytest.fixture
def points(site):
    """A built-in and two strangers; importing any of them would be seen in its state."""
    for distribution, name in (("headrace", "core_watch"), ("acme-watch", "acme_watch"), ("Zoo.Watch", "zoo_watch")):
        site.install(distribution, **{name: SOURCE.replace("NAME", name)})
    return site.entry_points()


def loaded(points, **gate):
    gate.setdefault("environ", {})
    return [each.id for each in Registry.discover(entry_points=points, **gate).report() if each.state == "loaded"]


@pytest.mark.parametrize(
    ("gate", "names"),
    [
        ({}, ["zoo_watch", "acme_watch", "core_watch"]),
        ({"disable": ["acme_watch"]}, ["zoo_watch", "core_watch"]),
        ({"disable": ["zoo-watch"]}, ["acme_watch", "core_watch"]),
        ({"disable": ["core_watch"]}, ["zoo_watch", "acme_watch"]),
        ({"strict": True}, ["core_watch"]),
        ({"strict": True, "allow": ["zoo_watch"]}, ["zoo_watch", "core_watch"]),
        ({"environ": {"HEADRACE_PLUGINS": "off"}}, ["core_watch"]),
        ({"environ": {"HEADRACE_PLUGINS": "acme_watch, zoo-watch"}}, ["zoo_watch", "acme_watch", "core_watch"]),
        ({"environ": {"HEADRACE_PLUGINS": "acme-watch"}}, ["acme_watch", "core_watch"]),
    ],
)
def test_the_gate_lets_in(points, gate, names):
    assert loaded(points, **gate) == names


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (
            {"disable": ["acme_wach"]},
            "plugins.disable: no plugin or distribution called 'acme_wach' is installed; did you",
        ),
        (
            {"allow": ["acme-wach"]},
            "plugins.allow: no distribution with plugins called 'acme-wach' is installed; did you",
        ),
        ({"environ": {"HEADRACE_PLUGINS": "acne"}}, "HEADRACE_PLUGINS: no plugin or distribution called 'acne' is"),
    ],
)
def test_a_name_that_nothing_installed_has_is_an_error(points, gate, message):
    with pytest.raises(ConfigError, match=message):
        loaded(points, **gate)


def test_a_plugin_that_is_kept_out_is_not_imported(site):
    site.install("acme", acme_loud="raise RuntimeError('imported')")
    (info,) = Registry.discover(entry_points=site.entry_points(), environ={}, disable=["acme"]).report()
    assert (info.state, info.reason, info.import_ms) == ("skipped", "disabled by plugins.disable", None)


def test_choosing_from_a_plugin_that_is_kept_out_tells_why(points):
    registry = Registry.discover(entry_points=points, environ={}, disable=["acme-watch"])
    with pytest.raises(ConfigError, match=r"plugin acme_watch \(acme-watch 1.0\) is not loaded: disabled by plugins"):
        registry.select("observer", "acme_watch/acme_watch")


def test_an_opt_in_slot_is_withheld_from_a_distribution_that_is_not_allowed(site):
    site.install("acme", acme_pages=ROUTES)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    assert registry.report()[0].withheld == ("routes",)
    assert registry.select("sampler", "dice").plugin.id == "acme_pages"
    with pytest.raises(ConfigError, match=r"plugin acme_pages \(acme 1.0\) fills it, but plugins.allow lacks acme"):
        registry.select("routes", "admin")


@pytest.mark.parametrize(
    ("distribution", "allow"), [("acme", ["acme"]), ("Acme_Pages", ["acme-pages"]), ("headrace", [])]
)
def test_an_allowed_distribution_and_the_builtins_fill_opt_in_slots(site, distribution, allow):
    site.install(distribution, acme_pages=ROUTES)
    registry = Registry.discover(entry_points=site.entry_points(), environ={}, allow=allow)
    assert registry.select("routes", "admin").plugin.withheld == ()
