"""What the operator has locked, no request may set."""

import pytest
from msgspec import Struct

from headrace.hooks.config import load
from headrace.hooks.errors import BadRequest, ConfigError
from headrace.hooks.locks import refuse_locked, unknown_fields
from headrace.hooks.origins import Where


class Params(Struct, forbid_unknown_fields=True):
    a: float = 1.0


CHAINS = {"logits": {"top-a": Params, "plain": None}, "stop": {"lines": Params}}


def refusal(locked, params=None, extra=None, **rest):
    with pytest.raises(BadRequest) as error:
        refuse_locked(locked, params or {}, extra or {}, **rest)
    assert error.value.status == 400
    return error.value.param


@pytest.mark.parametrize(
    ("lock", "asked", "param"),
    [
        ("temperature", {"params": {"temperature": 0.2}}, "temperature"),
        ("temperature", {"extra": {"temperature": {"value": 0.2}}}, "headrace.logits.temperature.value"),
        ("logits.top-p.p", {"params": {"top_p": 0.2}}, "top_p"),
        ("logits.top-a.a", {"extra": {"top-a": {"a": 0.2}}}, "headrace.logits.top-a.a"),
        ("logits.top-a", {"extra": {"top-a": {"a": 0.2}}}, "headrace.logits.top-a"),
        ("logits.top-a", {"extra": {"top-a": {}}}, "headrace.logits.top-a"),
        ("sampler.tau", {"sampler": {"tau": 3}}, "headrace.sampler.tau"),
        ("sampler", {"sampler": {"tau": 3}}, "headrace.sampler.tau"),
        ("seed", {"params": {"seed": 3}}, "seed"),
        ("stop", {"params": {"stop": ["x"]}}, "stop"),
        ("stop.lines.a", {"stop": {"lines": {"a": 1}}}, "headrace.stop.lines.a"),
    ],
)
def test_a_locked_field_is_refused_however_it_is_written(lock, asked, param):
    assert refusal([lock], **asked) == param


def test_what_is_not_locked_passes():
    asked = {"params": {"top_p": 0.5}, "extra": {"top-a": {"b": 1}}, "sampler": {"eta": 1}}
    refuse_locked(["temperature", "logits.top-a.a", "sampler.tau"], *asked.values())


def test_the_word_stop_is_not_all_stop_watchers():
    refuse_locked(["stop"], {}, {}, stop={"lines": {"a": 1}})
    refuse_locked(["stop.lines"], {"stop": ["x"]}, {})


@pytest.mark.parametrize(
    ("lock", "reason"),
    [
        ("temprature", "no parameter called 'temprature'; did you mean temperature?"),
        ("logits", "must be logits.NAME or logits.NAME.FIELD, got logits"),
        ("logits.a.b.c", "must be logits.NAME or logits.NAME.FIELD, got logits.a.b.c"),
        ("sampler.a.b", "must be sampler or sampler.FIELD, got sampler.a.b"),
    ],
)
def test_a_lock_that_nothing_can_run_into_is_an_error_of_the_configuration(lock, reason):
    with pytest.raises(ConfigError) as error:
        load(sets=[f"sampling.locked=seed,{lock}"])
    assert str(error.value) == f"--set: sampling.locked.1: {reason}"


@pytest.mark.parametrize(
    ("lock", "reason"),
    [
        ("logits.top-b", "no logits processor called 'top-b' is enabled; did you mean top-a?"),
        ("logits.top-a.aa", "top-a has no 'aa'; did you mean a? (fields: a)"),
        ("stop.lnes", "no stop watcher called 'lnes' is enabled; did you mean lines?"),
        ("logits.plain.a", "plain has no 'a' (fields: none)"),
        ("sampler.tau", "sampler has no 'tau' (fields: none)"),
    ],
)
def test_a_lock_of_a_field_that_is_not_there_is_told(lock, reason):
    (problem,) = unknown_fields([lock], CHAINS, None, Where(("locked",)))
    assert problem.reason == reason


def test_locks_of_fields_that_are_there_are_right():
    locked = ["logits.top-a.a", "logits.plain", "stop", "stop.lines.a", "sampler", "sampler.a", "seed"]
    assert list(unknown_fields(locked, CHAINS, Params, Where(()))) == []
