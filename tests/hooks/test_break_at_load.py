"""Seven ways to break at load, all installed at once beside the real built-ins: seven reasons, and a server without."""

import sys
from importlib import metadata

import pytest

from headrace.hooks.chain import build_sampling
from headrace.hooks.config import Sampling, Use
from headrace.hooks.errors import ConfigError, PluginError
from headrace.hooks.protocols import Context, SamplingContext
from headrace.hooks.registry import Registry

# The built-ins beside them do their work with it.
pytest.importorskip("torch")

GOOD = """
@plugin
def register_sampler(register): register({name!r}, lambda context, options: None)
"""
CLASH = """
class Mine:
    phase = "truncate"
    def __init__(self, context, options): ...
    def admit(self, slot, params, admitted): return False
    def apply(self, logits, rows): return logits

@plugin
def register_logits_processor(register): register("clash", Mine)

@plugin
def register_sampler(register): register("categorical", lambda context, options: None)
"""
SEVEN = {
    "gone": ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
    "broken": ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    "typo": ("@plugin\ndef register_smapler(register): ...", "register_smapler; did you mean register_sampler?"),
    "argued": ("@plugin\ndef register_sampler(register, order): ...", "{'order'} are declared in the hookimpl"),
    "future": ("headrace_api = 2\n" + GOOD.format(name="future"), "its headrace_api is 2 and this Headrace has 1"),
    "twin": (GOOD.format(name="twin"), "2 distributions bring a plugin of this name: acme-other 1.0 and acme-twin 1.0"),
}


@pytest.fixture
def registry(site):
    """The built-ins, the six of `SEVEN`, and the seventh: a good plugin that claims a built-in's name."""
    for name, (source, _) in SEVEN.items():
        site.install(f"acme-{name}", points={name: f"acme_{name}"}, **{f"acme_{name}": source})
    site.install("acme-other", points={"twin": "acme_other"}, acme_other=GOOD.format(name="other"))
    site.install("acme-clash", points={"clash": "acme_clash"}, acme_clash=CLASH)
    return Registry.discover(environ={})


def sampling(registry, **settings):
    context = Context(sampling=SamplingContext(vocab_size=8, num_slots=1))
    return build_sampling(registry, Sampling(**settings), context)


@pytest.mark.parametrize("name", SEVEN)
def test_each_is_noted_with_its_distribution_and_reason(registry, name):
    (info,) = (each for each in registry.report() if each.id == name and each.distribution == f"acme-{name}")
    assert info.state == "failed"
    assert SEVEN[name][1] in info.reason


@pytest.mark.parametrize("name", SEVEN)
def test_choosing_it_stops_the_start_with_the_reason(registry, name):
    with pytest.raises(PluginError) as caught:
        sampling(registry, sampler=Use(use=f"{name}/{name}"))
    assert str(caught.value).startswith(f"plugin {name} (acme-")
    assert SEVEN[name][1] in str(caught.value)


def test_the_seventh_clashes_with_a_builtin_and_the_operator_must_say_which(registry):
    with pytest.raises(ConfigError) as caught:
        sampling(registry)
    assert str(caught.value).startswith("sampling.sampler.use: 2 plugins offer a sampler called 'categorical'")
    assert str(caught.value).endswith("; write clash/categorical or categorical/categorical")
    assert sampling(registry, sampler=Use(use="categorical/categorical"))[1].distribution.startswith("headrace ")


def test_without_the_seventh_the_defaults_are_what_they_are_without_any(registry):
    ours = [each for each in metadata.entry_points(group="headrace.plugins") if each.dist.name == "headrace"]
    alone = sampling(Registry.discover(entry_points=ours, environ={}))
    beside = sampling(Registry.discover(environ={}, disable=["acme-clash"]))
    for (phase, bounds), (other_phase, other_bounds) in zip(alone[0], beside[0], strict=True):
        assert phase == other_phase
        assert [each.distribution + each.name for each in bounds] == [
            each.distribution + each.name for each in other_bounds
        ]
    assert alone[1].distribution == beside[1].distribution


def test_two_plugins_processors_of_one_name_cannot_both_be_in_the_chain(site):
    source = CLASH.replace('"clash"', '"top-p"')
    site.install(
        "acme-clash",
        points={"clash": "acme_clash"},
        acme_clash=source + "\nfrom headrace.plugins.top_p import Params\n",
    )
    registry = Registry.discover(environ={})
    defaults = Sampling().phases
    phases = (*defaults[:-1], type(defaults[-1])(phase="truncate", processors=(Use(use="top-p/top-p"),)))
    with pytest.raises(ConfigError, match=r"extra_processors.0.use: top-p of plugin top-p is in the chain already"):
        sampling(
            registry,
            phases=phases,
            extra_processors=(Use(use="clash/top-p"),),
            sampler=Use(use="categorical/categorical"),
        )


IDLE = """
import idle_calls

@plugin
def register_logits_processor(register):
    register("idle", "idle_parts:Idle")

@plugin
def register_observer(register):
    register("idle", lambda context, options: idle_calls.note("observer"))
"""


def test_what_is_installed_and_not_chosen_is_neither_built_nor_imported_beyond_its_entry_point(site):
    calls = "called = []\n\ndef note(what):\n    called.append(what)\n"
    site.install("acme-idle", points={"idle": "idle_plugin"}, idle_plugin=IDLE, idle_calls=calls, idle_parts="1 / 0")
    registry = Registry.discover(environ={})
    chain, _ = sampling(registry)
    assert "idle" in [each.name for each in registry.offered("logits_processor")]
    assert "idle" not in [bound.name for _, bounds in chain for bound in bounds]
    assert "idle_parts" not in sys.modules
    assert sys.modules["idle_calls"].called == []
