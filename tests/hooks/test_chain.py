"""The chain of logits processors, in the order of the configuration."""

from types import SimpleNamespace

import pytest
from msgspec import Struct

from headrace.hooks.chain import build_sampling
from headrace.hooks.config import PhaseUse, Sampling, Use, Where
from headrace.hooks.errors import ConfigError, PluginError
from headrace.hooks.origins import Origins
from headrace.hooks.protocols import PHASES, Context
from headrace.hooks.registry import Registry, plugin


class Any(Struct, frozen=True, forbid_unknown_fields=True):
    """Has each field that a word of `SamplingParams` fills."""

    bias: dict[int, float] = {}
    penalty: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    count: int = 0
    value: float = 1.0
    k: int = 0
    p: float = 1.0


class Processor:
    def __init__(self, phase):
        self.phase = phase

    def admit(self, slot, params, admitted): ...
    def apply(self, logits, rows): ...


class Sampler:
    def sample(self, logits, uniforms, rows): ...


DEFAULTS = {
    "logit-bias": "bias",
    "repetition": "penalty",
    "presence-frequency": "penalty",
    "min-tokens": "mask",
    "temperature": "temperature",
    "top-k": "truncate",
    "top-p": "truncate",
    "min-p": "truncate",
}


def registry_with(processors):
    """A registry with the draw and these processors, name → phase."""

    def processor_hook(register):
        for name, phase in processors.items():
            register(name, lambda context, options, phase=phase: Processor(phase), params=Any)

    def sampler_hook(register):
        register("categorical", lambda context, options: Sampler())

    registry = Registry()
    hooks = SimpleNamespace(
        processors=plugin(processor_hook, specname="register_logits_processor"),
        sampler=plugin(sampler_hook, specname="register_sampler"),
    )
    registry.add(hooks, "fakes")
    return registry


def built(config, processors=DEFAULTS, where=None):
    chain, sampler = build_sampling(registry_with(processors), config, Context(), where)
    return [(phase, [each.name for each in group]) for phase, group in chain], sampler.name


def phases(*groups):
    return tuple(
        PhaseUse(phase=phase, processors=tuple(Use(use=name) for name in processors)) for phase, *processors in groups
    )


def test_the_default_chain_has_the_default_order():
    assert built(Sampling()) == (
        [
            ("bias", ["logit-bias"]),
            ("penalty", ["repetition", "presence-frequency"]),
            ("mask", ["min-tokens"]),
            ("temperature", ["temperature"]),
            ("truncate", ["top-k", "top-p", "min-p"]),
        ],
        "categorical",
    )


def test_another_list_of_phases_is_another_order():
    config = Sampling(phases=phases(("truncate", "top-p"), ("temperature", "temperature")))
    assert built(config)[0] == [("truncate", ["top-p"]), ("temperature", ["temperature"])]


@pytest.mark.parametrize("phase", PHASES)
def test_a_further_processor_runs_at_the_end_of_its_phase(phase):
    config = Sampling(extra_processors=(Use(use="top-a"),))
    assert dict(built(config, {**DEFAULTS, "top-a": phase})[0])[phase][-1] == "top-a"


def test_everything_that_is_wrong_is_reported_with_its_place():
    config = Sampling(
        phases=phases(("bias", "top-p", "no-such"), ("penalty",)),
        extra_processors=(Use(use="top-k"),),
        sampler=Use(use="categorial"),
    )
    origins = Origins({("sampling", "phases", "0"): "headrace.toml:2:1", ("sampling", "sampler"): "headrace.toml:9:1"})
    with pytest.raises(ConfigError) as error:
        built(config, where=Where(("sampling",), origins))
    assert [line.partition(" (installed")[0] for line in str(error.value).splitlines()] == [
        "headrace.toml:2:1: sampling.phases.0.processors.0.use: "
        "top-p belongs to the phase truncate, which must be bias here",
        "headrace.toml:2:1: sampling.phases.0.processors.1.use: no logits processor called 'no-such'",
        "sampling.extra_processors.0.use: top-k belongs to the phase truncate, which must be bias or penalty here",
        "headrace.toml:9:1: sampling.sampler.use: no sampler called 'categorial'; did you mean categorical?",
    ]


def test_a_processor_of_no_known_phase_is_its_plugins_fault():
    with pytest.raises(PluginError, match="plugin fakes: logits processor top-a: its phase must be one of bias, pen"):
        built(Sampling(extra_processors=(Use(use="top-a"),)), {**DEFAULTS, "top-a": "later"})


def test_a_processor_under_a_known_name_must_have_the_field_that_requests_fill():
    hook = plugin(
        lambda register: register("top-p", lambda context, options: Processor("truncate")),
        specname="register_logits_processor",
    )
    registry = registry_with({})
    registry.add(SimpleNamespace(hook=hook), "acme")
    with pytest.raises(PluginError, match="top_p of a request fills the field p of its params, which is not there"):
        build_sampling(registry, Sampling(phases=phases(("truncate", "top-p"))), Context())
