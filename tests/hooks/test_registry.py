"""Choosing and building components. Broken plugins are in test_broken_plugins.py, what may load in test_gate.py."""

from types import SimpleNamespace

import pytest
from msgspec import Struct

from headrace.hooks.config import Use, Where
from headrace.hooks.errors import ConfigError, ModelError, PluginError
from headrace.hooks.origins import Origins
from headrace.hooks.protocols import Context
from headrace.hooks.registry import Registry, plugin

SAMPLER = """
class First:
    def __init__(self, context, options): self.context, self.options = context, options
    def sample(self, logits, uniforms, rows): return logits[:, 0]

@plugin
def register_sampler(register): register("first", First)
"""


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    kept: int = 1
    threshold: float = 0.5


class Draw:
    def __init__(self, context, options):
        self.context = context
        self.options = options

    def sample(self, logits, uniforms, rows): ...


def offering(*args, slot="sampler", **kwargs):
    """A plugin object that registers one component."""
    hook = plugin(lambda register: register(*args, **kwargs), specname=f"register_{slot}")
    return SimpleNamespace(hook=hook)


def registry_with(**plugins):
    registry = Registry()
    for name, each in plugins.items():
        registry.add(each, name)
    return registry


def test_a_discovered_component_is_selected_and_built(site):
    site.install("acme", "2.1", acme_draws=SAMPLER)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    context = Context(device="meta")
    bound = registry.select("sampler", "first").build(context)
    assert (bound.name, bound.plugin, bound.distribution) == ("first", "acme_draws", "acme 2.1")
    assert bound.component.context is context


def test_the_report_tells_what_is_installed_and_what_is_selected(site):
    site.install("acme", "2.1", acme_draws=SAMPLER)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    (info,) = registry.report()
    assert (info.id, info.distribution, info.version, info.state) == ("acme_draws", "acme", "2.1", "loaded")
    assert info.slots == {"sampler": ("first",)}
    assert info.import_ms > 0
    registry.select("sampler", "acme_draws/first")
    assert registry.report()[0].state == "selected"


def test_plugins_come_in_the_order_of_distribution_and_name(site):
    site.install("zebra", a_plugin=SAMPLER)
    site.install("acme", c_plugin=SAMPLER, b_plugin=SAMPLER)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    assert [each.id for each in registry.report()] == ["b_plugin", "c_plugin", "a_plugin"]


def test_a_factory_given_as_text_is_imported_when_it_is_built(site):
    site.install(
        "acme",
        points={"acme": "acme_light"},
        acme_light='@plugin\ndef register_sampler(register): register("heavy", "acme_heavy:First")',
        acme_heavy=SAMPLER,
    )
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    assert type(registry.select("sampler", "heavy").build(Context()).component).__name__ == "First"


def test_a_name_that_nobody_offers_is_refused_with_the_nearest_and_the_installed_ones():
    registry = registry_with(a=offering("min-p", Draw), b=offering("top-p", Draw))
    with pytest.raises(ConfigError) as error:
        registry.select("sampler", "minp")
    assert str(error.value) == "no sampler called 'minp'; did you mean min-p? (installed: min-p, top-p)"


def test_choosing_from_a_slot_that_nothing_fills_is_a_clear_error():
    with pytest.raises(ConfigError, match="nothing that is installed fills the slot grammar, so there is no grammar"):
        registry_with(a=offering("min-p", Draw)).select("grammar", "json-schema")


def test_two_claims_on_a_name_are_an_error_for_who_selects_it():
    registry = registry_with(a=offering("draw", Draw), b=offering("draw", Draw))
    with pytest.raises(ConfigError, match="2 plugins offer a sampler called 'draw': a and b; write a/draw or b/draw"):
        registry.select("sampler", "draw")


@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_qualified_name_chooses_between_claims(owner):
    registry = registry_with(a=offering("draw", Draw), b=offering("draw", Draw))
    assert registry.select("sampler", f"{owner}/draw").plugin.id == owner


@pytest.mark.parametrize(("name", "owner"), [("draw", "a"), ("a/draw", "a"), ("b/draw", "b")])
def test_a_declared_replacement_is_used_only_by_its_full_name(name, owner):
    registry = registry_with(a=offering("draw", Draw), b=offering("draw", Draw, replaces="a"))
    assert registry.select("sampler", name).plugin.id == owner


def test_a_qualified_name_of_an_unknown_plugin_suggests_one():
    with pytest.raises(ConfigError, match="no plugin called 'acne' is installed; did you mean acme"):
        registry_with(acme=offering("draw", Draw)).select("sampler", "acne/draw")


def test_a_qualified_name_that_its_plugin_lacks_is_refused():
    with pytest.raises(ConfigError, match="plugin a has no sampler called 'dice'"):
        registry_with(a=offering("draw", Draw)).select("sampler", "a/dice")


def test_options_become_the_struct_of_the_component():
    registry = registry_with(a=offering("draw", Draw, config=Options))
    bound = registry.build("sampler", Use(use="draw", options={"kept": 4}), Context())
    assert bound.component.options == bound.options == Options(kept=4, threshold=0.5)


def test_wrong_options_are_all_reported_with_their_places():
    registry = registry_with(a=offering("draw", Draw, config=Options))
    origins = Origins({("sampler", "options", "kep"): "headrace.toml:17:1", ("sampler",): "headrace.toml:16:1"})
    with pytest.raises(ConfigError) as error:
        registry.build(
            "sampler",
            Use(use="draw", options={"kep": 4, "threshold": "x"}),
            Context(),
            Where(("sampler",), origins),
        )
    assert str(error.value).splitlines() == [
        "headrace.toml:17:1: sampler.options.kep: unknown; did you mean kept?",
        "headrace.toml:16:1: sampler.options.threshold: must be number, got 'x'",
    ]


def test_options_for_a_component_without_any_are_refused():
    with pytest.raises(ConfigError, match=r"sampler\.options: draw takes no options, got size"):
        registry_with(a=offering("draw", Draw)).build("sampler", Use(use="draw", options={"size": 1}), Context())


def test_a_factory_that_fails_names_plugin_distribution_and_reason(site):
    source = '@plugin\ndef register_sampler(register): register("first", lambda context, options: 1 // 0)'
    site.install("acme", "2.1", acme_draws=source)
    component = Registry.discover(entry_points=site.entry_points(), environ={}).select("sampler", "first")
    with pytest.raises(PluginError, match=r"plugin acme_draws \(acme 2.1\): sampler first could not be built: ZeroDiv"):
        component.build(Context())


def test_what_a_factory_raises_on_purpose_is_left_alone():
    def factory(context, options):
        raise ModelError("the file is cut")

    with pytest.raises(ModelError, match="the file is cut"):
        registry_with(a=offering("draw", factory)).select("sampler", "draw").build(Context())


def test_a_built_object_that_lacks_a_member_of_the_protocol_is_refused():
    component = registry_with(a=offering("draw", lambda context, options: object())).select("sampler", "draw")
    with pytest.raises(PluginError, match=r"sampler draw must do what protocols.Sampler says, but object lacks sample"):
        component.build(Context())


def test_every_claim_on_a_slot_is_offered():
    registry = registry_with(a=offering("x", Draw), b=offering("y", Draw), c=offering("z", Draw, slot="observer"))
    assert [each.name for each in registry.offered("sampler")] == ["x", "y"]
