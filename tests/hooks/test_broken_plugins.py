"""One broken plugin never stops the others, and is fatal only to who chooses it."""

import pytest

from headrace.hooks.errors import ConfigError, PluginError
from headrace.hooks.protocols import Context
from headrace.hooks.registry import Registry

GOOD = """
class Draw:
    def __init__(self, context, options): ...
    def sample(self, logits, uniforms, rows): ...

@plugin
def register_sampler(register): register("good", Draw)
"""
STRUCTS = """
from msgspec import Struct
class Loose(Struct): x: int = 1
class Bare(Struct, forbid_unknown_fields=True): x: int
class Odd(Struct, forbid_unknown_fields=True): x: "Nowhere" = 1
"""


def registering(call):
    return f"{STRUCTS}\n@plugin\ndef register_sampler(register):\n    register('bad', print)\n    register({call})"


BROKEN = {
    "a missing module": ("import nowhere_at_all", "cannot be imported: ModuleNotFoundError: No module named 'nowhere"),
    "an error on import": ("1 / 0", "cannot be imported: ZeroDivisionError"),
    "an attempt to leave": ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    "a syntax error": ("def f(:", "cannot be imported: SyntaxError"),
    "another API": ("headrace_api = 7", "its headrace_api is 7 and this Headrace has 1"),
    "no hook": ("x = 1", "it has no hook; mark each register_"),
    "a misspelt hook": (
        "@plugin\ndef register_smapler(register): ...",
        "there is no hook register_smapler; did you mean register_sampler?",
    ),
    "a wrong argument": (
        "@plugin\ndef register_sampler(register, order): ...",
        "{'order'} are declared in the hookimpl",
    ),
    "an async hook": ("@plugin\nasync def register_sampler(register): ...", "must be a plain function, not async"),
    "a hook that fails": ("@plugin\ndef register_sampler(register): 1 / 0", "register_sampler: division by zero"),
    "a bad name": (registering("'a/b', print"), "a name must be of letters, digits, '.', '_' and '-', got 'a/b'"),
    "a name twice": (registering("'bad', print"), "sampler bad is registered twice"),
    "a factory that is none": (registering("'x', 3"), "x: the factory must be callable or 'module:attribute', got 3"),
    "a loose config": (registering("'x', print, config=Loose"), "x: config=Loose must be declared with forbid_unknown"),
    "loose params": (registering("'x', print, params=Loose"), "x: params=Loose must be declared with forbid_unknown"),
    "a config that is no struct": (registering("'x', print, config=dict"), "x: config must be a msgspec.Struct, got"),
    "a params field without default": (
        registering("'x', print, params=Bare"),
        "must have a default for every field, lacks x",
    ),
    "an annotation that means nothing": (registering("'x', print, config=Odd"), "name 'Nowhere' is not defined"),
}


def discovered(site, broken):
    site.install("acme", "1.2", acme_bad=broken)
    site.install("fine", fine_draws=GOOD)
    return Registry.discover(entry_points=site.entry_points(), environ={})


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_plugin_is_noted_and_the_others_load(site, source, reason):
    bad, good = discovered(site, source).report()
    assert (bad.id, bad.state, good.state) == ("acme_bad", "failed", "loaded")
    assert reason in bad.reason


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_plugin_is_fatal_to_who_chooses_it(site, source, reason):
    with pytest.raises(PluginError) as error:
        discovered(site, source).select("sampler", "acme_bad/bad")
    assert str(error.value).startswith("plugin acme_bad (acme 1.2): sampler bad was chosen, but ")
    assert reason in str(error.value)


def test_a_failed_plugin_keeps_none_of_the_components_it_registered_before(site):
    registry = discovered(site, registering("'bad', print"))
    assert [each.name for each in registry.offered("sampler")] == ["good"]


def test_a_component_that_a_failed_plugin_had_offered_names_that_plugin(site):
    with pytest.raises(
        PluginError, match=r"plugin acme_bad \(acme 1.2\): sampler bad was chosen, but register_sampler"
    ):
        discovered(site, registering("'x', 3")).select("sampler", "bad")


def test_an_unknown_name_also_tells_which_plugins_failed(site):
    with pytest.raises(
        ConfigError, match=r"no sampler called 'gold'; did you mean good\?.*plugin acme_bad .* failed: "
    ):
        discovered(site, "import nowhere_at_all").select("sampler", "gold")


def test_a_broken_neighbour_does_not_keep_a_good_component_from_being_built(site):
    assert discovered(site, "1 / 0").select("sampler", "good").build(Context()).plugin == "fine_draws"


def test_two_distributions_with_one_plugin_name_both_fail(site):
    site.install("acme", points={"draws": "acme_draws"}, acme_draws=GOOD)
    site.install("other", points={"draws": "other_draws"}, other_draws=GOOD)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    assert [each.state for each in registry.report()] == ["failed", "failed"]
    with pytest.raises(
        PluginError, match=r"2 distributions bring a plugin of this name: acme 1.0 and other 1.0; disable"
    ):
        registry.select("sampler", "draws/good")


def test_disabling_one_of_two_distributions_frees_the_plugin_name(site):
    site.install("acme", points={"draws": "acme_draws"}, acme_draws=GOOD)
    site.install("other", points={"draws": "other_draws"}, other_draws=GOOD)
    registry = Registry.discover(entry_points=site.entry_points(), environ={}, disable=["other"])
    assert registry.select("sampler", "good").plugin.distribution == "acme"


def test_a_stranger_cannot_take_the_plugin_name_of_a_builtin(site):
    site.install("headrace", points={"draws": "builtin_draws"}, builtin_draws=GOOD)
    site.install("acme", points={"draws": "acme_draws"}, acme_draws=GOOD)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    assert registry.select("sampler", "draws/good").plugin.distribution == "headrace"


def test_a_broken_plugin_added_by_hand_is_refused_at_once():
    with pytest.raises(PluginError, match="plugin mine: it has no hook"):
        Registry().add(object(), "mine")
