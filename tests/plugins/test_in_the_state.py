"""Built-ins in the sampling state: parameters of each request, random numbers of their own, forks and preemption."""

from array import array

import pytest
import torch
from msgspec import structs

from headrace.core.sampling import SamplingState
from headrace.hooks.errors import BadRequest
from headrace.hooks.messages import Fork, Release
from headrace.hooks.params import SamplingParams
from headrace.hooks.stack import freeze
from tests.plugins.rig import admission, build, random_logits

VOCAB_SIZE = 100


def make_state(*processors, sampler="categorical"):
    bounds = [build("logits_processor", name) for name in processors]
    bound = build("sampler", sampler)
    state = SamplingState(num_slots=8, vocab_size=VOCAB_SIZE, chain=[bounds], sampler=bound)
    return state, bounds, bound


def mirostat(state, bound, slot, seed, **params):
    op = admission(slot, seed=seed)
    state.apply_ops((structs.replace(op, sampler=bound.params(**params)),))


def run(state, slot, seed, places, company=()):
    """The tokens that *slot* draws at *places*, with slots of *company* beside it."""
    drawn = []
    for place in places:
        rows = torch.cat(
            [random_logits(VOCAB_SIZE, 1, seed=1000 * seed + place), random_logits(VOCAB_SIZE, len(company))]
        )
        drawn.append(state.draw(rows, [slot, *company], [place] * (1 + len(company))).token_ids[0])
    return drawn


def test_each_request_has_a_mirostat_of_its_own_that_outlives_a_pause_and_ignores_company():
    state, _, bound = make_state(sampler="mirostat")
    mirostat(state, bound, 0, 5, tau=2.0, eta=0.5)
    alone = run(state, 0, 5, range(20))
    state, _, bound = make_state(sampler="mirostat")
    for slot, tau in ((3, 2.0), (1, 9.0), (6, 0.5)):
        mirostat(state, bound, slot, 5, tau=tau, eta=0.5)
    # Preempted after ten tokens: its slot stays, other requests go on and come.
    first = run(state, 3, 5, range(10), company=(1, 6))
    run(state, 1, 7, range(10, 15))
    state.apply_ops((Release(slot=6),))
    mirostat(state, bound, 6, 8, tau=3.0)
    assert first + run(state, 3, 5, range(10, 20), company=(6,)) == alone
    state, _, bound = make_state(sampler="mirostat")
    mirostat(state, bound, 0, 5, tau=9.0, eta=0.5)
    assert run(state, 0, 5, range(20)) != alone


def test_a_choice_forked_off_starts_with_a_mirostat_of_its_own():
    state, _, bound = make_state(sampler="mirostat")
    mirostat(state, bound, 0, 5, tau=2.0)
    state.apply_ops((Fork(source=0, slot=1, choice=1),))
    draws = state.draw(random_logits(VOCAB_SIZE, 1).repeat(2, 1), [0, 1], [0, 0])
    assert not draws.errors
    assert bound.component._mu[:2].tolist() != [4.0, 4.0]


@pytest.mark.parametrize("company", [(), (1,), (1, 2, 5)])
def test_xtc_happens_at_the_same_places_in_any_company(company):
    def draw(others):
        state, (bound,), _ = make_state("xtc")
        params = bound.params(probability=0.5, threshold=0.02)
        state.apply_ops(tuple(structs.replace(admission(slot, seed=slot), chain=(params,)) for slot in (0, *others)))
        return run(state, 0, 3, range(40), company=others)

    assert draw(company) == draw(())


def test_the_random_numbers_of_a_component_are_not_those_of_the_sampler():
    seen = {}

    class Looking:
        phase = "mask"

        def admit(self, slot, params, admitted):
            return True

        def apply(self, logits, rows):
            seen["one"], seen["other"] = rows.uniforms("one").tolist(), rows.uniforms("other").tolist()
            seen["again"] = rows.uniforms("one").tolist()
            return logits

    class Drawing:
        def sample(self, logits, uniforms, rows):
            seen["sampler"] = uniforms.tolist()
            return logits.argmax(-1)

    bound = build("logits_processor", "xtc")
    looking, drawing = structs.replace(bound, component=Looking()), structs.replace(bound, component=Drawing())
    state = SamplingState(num_slots=8, vocab_size=VOCAB_SIZE, chain=[[looking]], sampler=drawing)
    state.apply_ops(tuple(structs.replace(admission(slot, seed=4), chain=(bound.params(),)) for slot in (0, 1)))
    state.draw(random_logits(VOCAB_SIZE, 2), [0, 1], [0, 7])
    assert seen["one"] == seen["again"]
    numbers = [*seen["one"], *seen["other"], *seen["sampler"]]
    assert len(set(numbers)) == 6
    assert all(0 <= number < 1 for number in numbers)


# ── what requests may ask ─────────────────────────────────────────────────────────────────────────────────────────


def stack(sampler="categorical", processors=(), **options):
    some = build("scheduler_policy", "fcfs")
    return freeze(
        tokenizer=some,
        chat_template=some,
        policy=some,
        chain=(("mask", tuple(build("logits_processor", name) for name in processors)),),
        sampler=build("sampler", sampler, **options),
        observers=(),
    )


def test_a_request_sets_parameters_of_the_sampler_over_the_operators():
    chosen = stack("mirostat", tau=3.0, eta=0.2)
    assert structs.astuple(chosen.resolve_sampler({"eta": 0.5})) == (3.0, 0.5)
    assert structs.astuple(chosen.resolve_sampler()) == (3.0, 0.2)


@pytest.mark.parametrize(
    ("sampler", "asked", "param"),
    [
        ("mirostat", {"tau": 0}, "headrace.sampler.tau"),
        ("mirostat", {"tou": 1}, "headrace.sampler.tou"),
        ("mirostat", {"eta": "fast"}, "headrace.sampler.eta"),
        ("categorical", {"tau": 1.0}, "headrace.sampler.tau"),
    ],
)
def test_what_the_sampler_cannot_do_is_refused_by_its_name(sampler, asked, param):
    with pytest.raises(BadRequest) as caught:
        stack(sampler).resolve_sampler(asked)
    assert caught.value.param == param


OUT_OF_RANGE = (
    ("dry", "base", 0.5),
    ("dry", "multiplier", -1),
    ("dry", "allowed_length", 0),
    ("typical", "p", 0),
    ("top-n-sigma", "n", -1),
    ("xtc", "probability", 1.5),
    ("xtc", "threshold", 0),
    ("no-repeat-ngram", "ngram_size", -1),
    ("bad-words", "bad_words", [""]),
    ("bad-words", "bad_words_ids", [[]]),
)


@pytest.mark.parametrize(("name", "field", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_and_not_clamped(name, field, value):
    with pytest.raises(BadRequest) as caught:
        stack(processors=[name]).resolve(SamplingParams(), {name: {field: value}})
    assert caught.value.param.startswith(f"headrace.logits.{name}.{field}")


@pytest.mark.parametrize("name", sorted({name for name, _, _ in OUT_OF_RANGE}))
def test_a_processor_that_is_enabled_changes_nothing_until_it_is_asked_to(name):
    bound = build("logits_processor", name)
    (params,) = stack(processors=[name]).resolve(SamplingParams())
    op = structs.replace(admission(0), output_ids=array("i", [1, 2, 1, 2]))
    assert bound.component.admit(0, params, op) is False
