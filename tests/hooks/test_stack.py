"""What a request's parameters come to. The processors here only have parameters; what they do is tested elsewhere."""

from typing import Annotated

import pytest
from msgspec import Meta, Struct

from headrace.hooks.components import Bound
from headrace.hooks.errors import BadRequest, RequestFailed
from headrace.hooks.params import SamplingParams
from headrace.hooks.stack import NoParams, freeze


class Penalty(Struct, frozen=True, forbid_unknown_fields=True):
    presence: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency: Annotated[float, Meta(ge=-2, le=2)] = 0.0


class TopP(Struct, frozen=True, forbid_unknown_fields=True):
    p: Annotated[float, Meta(ge=0, le=1)] = 1.0


class TopK(Struct, frozen=True, forbid_unknown_fields=True):
    k: int = 0


class Bias(Struct, frozen=True, forbid_unknown_fields=True):
    bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = {}


class TopA(Struct, frozen=True, forbid_unknown_fields=True):
    power: Annotated[float, Meta(gt=0)] = 2.0
    floor: float = 0.0


class Checked:
    """A processor that refuses what it cannot serve."""

    def __init__(self, error=None):
        self.error = error

    def check(self, params):
        if self.error:
            raise self.error


def bound(name, params=None, options=None, component=None, version="1.0"):
    return Bound(
        name=name,
        plugin=f"{name}-plugin",
        component=component,
        params=params,
        options=options,
        distribution=f"acme {version}",
    )


BIAS, PENALTY, TOP_K, TOP_P, TOP_A = (
    bound("logit-bias", Bias),
    bound("presence-frequency", Penalty),
    bound("top-k", TopK),
    bound("top-p", TopP),
    bound("top-a", TopA),
)


def stack(*processors, **kwargs):
    parts = {
        "tokenizer": bound("bytes"),
        "chat_template": bound("plain"),
        "policy": bound("fcfs"),
        "sampler": bound("categorical"),
        "observers": (),
        "chain": (("penalty", processors[:1]), ("truncate", processors[1:])),
    }
    return freeze(**{**parts, **kwargs})


def test_processors_are_flattened_in_running_order():
    assert [each.name for each in stack(PENALTY, TOP_P, TOP_A).processors] == ["presence-frequency", "top-p", "top-a"]


def test_neutral_words_leave_their_processors_out():
    assert stack(PENALTY, TOP_P, TOP_K).resolve(SamplingParams()) == (None, None, None)


@pytest.mark.parametrize(
    ("params", "resolved"),
    [
        (SamplingParams(top_p=0.9), (None, TopP(p=0.9), None, None)),
        (SamplingParams(presence_penalty=1.0), (Penalty(presence=1.0), None, None, None)),
        (
            SamplingParams(presence_penalty=1.0, frequency_penalty=-0.5),
            (Penalty(presence=1.0, frequency=-0.5), None, None, None),
        ),
        (SamplingParams(logit_bias={5: -1.0}), (None, None, Bias(bias={5: -1.0}), None)),
        (SamplingParams(top_k=40), (None, None, None, TopK(k=40))),
        (SamplingParams(top_k=-1), (None, None, None, None)),
    ],
)
def test_a_word_of_the_request_fills_the_field_it_stands_for(params, resolved):
    assert stack(PENALTY, TOP_P, BIAS, TOP_K).resolve(params) == resolved


@pytest.mark.parametrize(
    ("extra", "resolved"),
    [
        ({"top-p": {"p": 0.5}}, (None, TopP(p=0.5))),
        ({"presence-frequency": {"frequency": 1.5}}, (Penalty(presence=1.0, frequency=1.5), TopP(p=0.9))),
        ({"presence-frequency": {}}, (Penalty(presence=1.0), TopP(p=0.9))),
    ],
)
def test_extra_goes_over_the_words_of_the_request(extra, resolved):
    params = SamplingParams(top_p=0.9, presence_penalty=1.0)
    result = stack(PENALTY, TOP_P).resolve(params, extra)
    assert result == (resolved[0] or Penalty(presence=1.0), resolved[1])


def test_naming_a_processor_in_extra_uses_it_even_at_its_defaults():
    assert stack(PENALTY, TOP_P).resolve(SamplingParams(), {"top-p": {}}) == (None, TopP())


def test_keys_of_extra_may_be_numbers_in_quotes():
    assert stack(BIAS).resolve(SamplingParams(), {"logit-bias": {"bias": {"7": 2}}}) == (Bias(bias={7: 2.0}),)


def test_a_processor_without_a_word_of_its_own_is_used_by_every_request():
    assert stack(TOP_A).resolve(SamplingParams()) == (TopA(power=2.0),)


def test_options_of_the_type_of_the_parameters_are_the_default_of_every_request():
    top_a = bound("top-a", TopA, options=TopA(power=1.5, floor=0.1))
    assert stack(top_a).resolve(SamplingParams()) == (TopA(power=1.5, floor=0.1),)
    assert stack(top_a).resolve(SamplingParams(), {"top-a": {"power": 3}}) == (TopA(power=3.0, floor=0.1),)


def test_a_processor_without_parameters_is_in_use():
    assert stack(bound("no-digits")).resolve(SamplingParams()) == (NoParams(),)


@pytest.mark.parametrize(
    ("params", "extra", "param", "message"),
    [
        (
            SamplingParams(),
            {"top-b": {}},
            "headrace.logits.top-b",
            r"'top-b' is enabled; did you mean top-p\? \(enabled",
        ),
        (SamplingParams(top_k=5), {}, "top_k", "top_k needs the logits processor top-k, which is not enabled here"),
        (SamplingParams(top_p=3), {}, "top_p", "^top_p: must be number >= 0 and <= 1, got 3$"),
        (
            SamplingParams(logit_bias={5: 500}),
            {},
            "logit_bias.5",
            "^logit_bias.5: must be number >= -100 and <= 100, got",
        ),
        (SamplingParams(), {"top-p": {"p": 3}}, "headrace.logits.top-p.p", "^headrace.logits.top-p.p: must be number"),
        (SamplingParams(top_p=0.5), {"top-p": {"p": "x"}}, "headrace.logits.top-p.p", "must be number >= 0"),
        (SamplingParams(), {"top-p": {"q": 1}}, "headrace.logits.top-p.q", "headrace.logits.top-p.q: unknown"),
        (SamplingParams(), {"top-p": 0.9}, "headrace.logits.top-p", "must be an object, got 0.9"),
        (SamplingParams(), {"no-digits": {"x": 1}}, "headrace.logits.no-digits.x", "unknown"),
    ],
)
def test_a_request_is_refused_with_the_path_of_what_is_wrong(params, extra, param, message):
    with pytest.raises(BadRequest, match=message) as error:
        stack(PENALTY, TOP_P, BIAS, bound("no-digits")).resolve(params, extra)
    assert error.value.param == param


def test_a_processor_may_refuse_parameters_and_is_named():
    top_a = bound("top-a", TopA, component=Checked(BadRequest("too high for this model")))
    with pytest.raises(BadRequest, match="too high for this model") as error:
        stack(top_a).resolve(SamplingParams())
    assert (error.value.param, error.value.plugin) == ("headrace.logits.top-a", "top-a-plugin")


def test_a_processor_that_fails_on_parameters_fails_the_request_and_is_named():
    with pytest.raises(RequestFailed, match="top-a of plugin top-a-plugin failed to check") as error:
        stack(bound("top-a", TopA, component=Checked(ValueError("?")))).resolve(SamplingParams())
    assert error.value.plugin == "top-a-plugin"


def test_a_processor_is_not_asked_about_a_request_that_does_not_use_it():
    top_p = bound("top-p", TopP, component=Checked(BadRequest("never asked")))
    assert stack(top_p).resolve(SamplingParams()) == (None,)


def test_equal_stacks_have_equal_fingerprints():
    assert stack(PENALTY, TOP_P).fingerprint == stack(PENALTY, TOP_P).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        stack(TOP_P, PENALTY),
        stack(PENALTY),
        stack(PENALTY, TOP_P, observers=(bound("watch"),)),
        stack(PENALTY, TOP_P, policy=bound("priority")),
        stack(PENALTY, TOP_P, sampler=bound("categorical", version="1.1")),
        stack(PENALTY, TOP_P, sampler=bound("categorical", options=TopA(power=3.0))),
        stack(PENALTY, TOP_P, chain=(("penalty", (PENALTY, TOP_P)), ("truncate", ()))),
    ],
)
def test_a_different_stack_has_another_fingerprint(other):
    assert other.fingerprint != stack(PENALTY, TOP_P).fingerprint
