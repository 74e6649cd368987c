"""Each built-in processor: against transformers' on random logits, and the values of tests/cases."""

import importlib
import math
from array import array

import msgspec
import pytest
import torch
import transformers

from headrace.core.history import TokenHistory
from headrace.hooks.errors import BadRequest
from headrace.hooks.messages import Admit
from headrace.hooks.params import ALIASES, SamplingParams
from headrace.hooks.protocols import PHASES, Context, Rows, SamplingContext
from tests.sampling.chains import DEFAULT, Line

INF = math.inf
VOCAB_SIZES = (1, 2, 50, 127, 1000, 5003)
COMPONENTS = {name: (component, params) for group in DEFAULT for name, component, params in group}


def random_logits(vocab_size, num_rows, *, scale=3.0, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def apply(name, logits, params, *, prompts=None, outputs=None, end_ids=frozenset()):
    """Admit one sequence a row, with the row's parameters, and apply the processor to those that want it."""
    num_rows, vocab_size = logits.shape
    component_type, params_type = COMPONENTS[name]
    component = component_type(Context(sampling=SamplingContext(vocab_size=vocab_size, num_slots=num_rows)), None)
    history = TokenHistory(num_rows)
    prompts, outputs = prompts or [[0]] * num_rows, outputs or [[]] * num_rows
    wanted = []
    for row, values in enumerate(params):
        op = Admit(
            slot=row,
            choice=0,
            params=SamplingParams(),
            chain=(),
            end_ids=end_ids,
            prompt_ids=array("i", prompts[row]),
            output_ids=array("i", outputs[row]),
        )
        history.admit(row, op.prompt_ids, op.output_ids)
        if component.admit(row, params_type(**values), op):
            wanted.append(row)
    result = logits.clone()
    if wanted:
        rows = Rows(wanted, [len(outputs[row]) for row in wanted], history)
        result[wanted] = component.apply(logits[wanted], rows)
    return result


def finite(row):
    return (row > -INF).nonzero()[:, 0].tolist()


# ── against transformers ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_repetition_equals_transformers(vocab_size):
    logits = random_logits(vocab_size, 4)
    prompts = torch.randint(vocab_size, (4, 6), generator=torch.Generator().manual_seed(1)).tolist()
    outputs = torch.randint(vocab_size, (4, 9), generator=torch.Generator().manual_seed(2)).tolist()
    penalties = [1.5, 0.5, 1.0, 10.0]
    result = apply("repetition", logits, [{"penalty": p} for p in penalties], prompts=prompts, outputs=outputs)
    for row, penalty in enumerate(penalties):
        theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        ids = torch.tensor([prompts[row] + outputs[row]])
        assert torch.equal(result[row], theirs(ids, logits[row : row + 1].clone())[0])


def test_temperature_equals_transformers():
    logits = random_logits(1000, 4)
    values = [0.1, 0.7, 1.0, 10.0]
    result = apply("temperature", logits, [{"value": value} for value in values])
    for row, value in enumerate(values):
        assert torch.equal(result[row], transformers.TemperatureLogitsWarper(value)(None, logits[row : row + 1])[0])


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_top_k_equals_transformers(vocab_size):
    ks = [1, 2, 40, 256, 257, 5000, 2**31 - 1]
    logits = random_logits(vocab_size, len(ks))
    result = apply("top-k", logits, [{"k": k} for k in ks])
    for row, k in enumerate(ks):
        assert torch.equal(result[row], transformers.TopKLogitsWarper(k)(None, logits[row : row + 1])[0])


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_top_p_equals_transformers(vocab_size, scale):
    ps = [0.0, 0.1, 0.5, 0.9, 0.99]
    logits = random_logits(vocab_size, len(ps), scale=scale)
    result = apply("top-p", logits, [{"p": p} for p in ps])
    for row, p in enumerate(ps):
        assert torch.equal(result[row], transformers.TopPLogitsWarper(p)(None, logits[row : row + 1])[0])


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_top_p_after_top_k_equals_transformers(vocab_size):
    ks = [2, 30, 64, 65, 300]
    logits = apply("top-k", random_logits(vocab_size, len(ks), scale=1.0), [{"k": k} for k in ks])
    result = apply("top-p", logits, [{"p": 0.8}] * len(ks))
    for row in range(len(ks)):
        assert torch.equal(result[row], transformers.TopPLogitsWarper(0.8)(None, logits[row : row + 1])[0])


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_min_p_equals_transformers(vocab_size):
    ps = [0.0, 0.01, 0.3, 0.9, 1.0]
    logits = random_logits(vocab_size, len(ps))
    result = apply("min-p", logits, [{"p": p} for p in ps])
    for row, p in enumerate(ps):
        assert torch.equal(result[row], transformers.MinPLogitsWarper(p)(None, logits[row : row + 1])[0])


# ── against the cases ─────────────────────────────────────────────────────────────────────────────────────────────


def test_sa01_a_tiny_temperature_leaves_the_greedy_token_without_nan():
    logits = torch.tensor([[11.0625, 2.955, 2.875]], dtype=torch.float16).float()
    result = apply("temperature", logits, [{"value": 1e-5}])
    assert result.softmax(-1).tolist() == [[1, 0, 0]]


def test_temperature_0_divides_nothing():
    logits = random_logits(100, 1)
    assert torch.equal(apply("temperature", logits, [{"value": 0.0}]), logits)


@pytest.mark.parametrize("k", [0, -1])
def test_sa02_top_k_0_and_minus_1_are_off(k):
    logits = random_logits(100, 1)
    assert torch.equal(apply("top-k", logits, [{"k": k}]), logits)


def test_sa05_negative_logits_are_multiplied_and_each_id_counts_once():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    result = apply("repetition", logits, [{"penalty": 1.5}], prompts=[[0, 1]], outputs=[[1]])
    torch.testing.assert_close(result, torch.tensor([[4 / 3, -1.5, 0.5, 0.0]]))


def test_sa06_presence_and_frequency_count_the_output_alone():
    logits = torch.tensor([[3.0, 1, 0, -2]])
    params = {"presence": 0.25, "frequency": 0.5}
    result = apply("presence-frequency", logits, [params], prompts=[[2] * 10], outputs=[[0, 0, 0, 1]])
    assert result.tolist() == [[1.25, 0.25, 0, -2]]


def test_sa06_nothing_is_penalised_before_the_first_token():
    logits = torch.tensor([[3.0, 1, 0, -2]])
    result = apply("presence-frequency", logits, [{"presence": 2, "frequency": 2}], prompts=[[0] * 8])
    assert torch.equal(result, logits)


@pytest.mark.parametrize(("p", "kept"), [(0.29, 3), (0.31, 2), (0.61, 1)])
def test_sa18_min_p_is_relative_to_the_likeliest(p, kept):
    result = apply("min-p", torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), [{"p": p}])
    assert finite(result[0]) == list(range(kept))


@pytest.mark.parametrize(("temperature", "p", "kept"), [(2.0, 0.8, 3), (1.0, 0.8, 2), (1.0, 0.81, 3)])
def test_sa20_temperature_comes_before_top_p(temperature, p, kept):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    result = Line(4).candidates(logits.tolist(), temperature=temperature, chain={"top-p": {"p": p}})
    assert finite(result) == list(range(kept))


# ── what neither says ─────────────────────────────────────────────────────────────────────────────────────────────


def test_logit_bias_is_added_to_its_tokens_alone():
    logits = torch.zeros(3, 5)
    result = apply("logit-bias", logits, [{"bias": {1: 2.5, 4: -100}}, {"bias": {}}, {"bias": {0: 1}}])
    assert result.tolist() == [[0, 2.5, 0, 0, -100], [0] * 5, [1, 0, 0, 0, 0]]


def test_logit_bias_refuses_an_id_beyond_the_vocabulary_and_names_it():
    component_type, params_type = COMPONENTS["logit-bias"]
    component = component_type(Context(sampling=SamplingContext(vocab_size=100, num_slots=1)), None)
    component.check(params_type(bias={99: 5}))
    with pytest.raises(BadRequest, match="must be under 100, found 100") as caught:
        component.check(params_type(bias={5: -100, 100: 5}))
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(("num_outputs", "kept"), [(0, [0, 2]), (3, [0, 2]), (4, [0, 1, 2, 3])])
def test_min_tokens_rules_out_every_end_id_until_there_are_enough(num_outputs, kept):
    result = apply(
        "min-tokens", torch.zeros(1, 4), [{"count": 4}], outputs=[[0] * num_outputs], end_ids=frozenset({1, 3, 77})
    )
    assert finite(result[0]) == kept


def test_top_p_1_keeps_even_what_rounds_to_no_probability():
    logits = torch.tensor([[200.0, 0, -200]])
    assert torch.equal(apply("top-p", logits, [{"p": 1.0}]), logits)


def test_top_k_of_equals_keeps_the_smallest_ids():
    result = apply("top-k", torch.tensor([[1.0, 2, 2, 2, 3, 2]]), [{"k": 3}])
    assert finite(result[0]) == [1, 2, 4]


@pytest.mark.parametrize("vocab_size", [4, 64, 65, 5000])
def test_top_p_of_equals_keeps_the_smallest_ids(vocab_size):
    result = apply("top-p", torch.zeros(1, vocab_size), [{"p": 0.5}])
    assert finite(result[0]) == list(range(-(-vocab_size // 2)))


def test_top_k_keeps_all_of_a_row_that_has_fewer_left():
    logits = torch.tensor([[-INF, 1.0, -INF, 0.0]])
    assert torch.equal(apply("top-k", logits, [{"k": 3}]), logits)


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p"])
def test_truncation_never_empties_a_row(name):
    logits = torch.full((1, 300), -INF)
    logits[0, 123] = -50
    values = {"k": 1} if name == "top-k" else {"p": 1.0 if name == "min-p" else 0.0}
    assert finite(apply(name, logits, [values])[0]) == [123]


def test_top_p_of_a_flat_row_does_not_depend_on_its_neighbours():
    flat, steep = random_logits(3000, 1, scale=0.5), random_logits(3000, 1, scale=20.0, seed=1)
    together = apply("top-p", torch.cat([steep, flat, steep]), [{"p": 0.9}] * 3)
    assert torch.equal(together[1], apply("top-p", flat, [{"p": 0.9}])[0])


@pytest.mark.parametrize("field", ALIASES)
def test_a_parameter_has_the_limits_and_default_of_the_field_it_stands_for(field):
    name, own_field = ALIASES[field]
    ours = {f.name: f for f in msgspec.structs.fields(COMPONENTS[name][1])}[own_field]
    outer = {f.name: f for f in msgspec.structs.fields(SamplingParams)}[field]
    assert ours.type == outer.type
    assert (ours.default, ours.default_factory) == (outer.default, outer.default_factory)


def test_the_default_chain_runs_its_phases_in_order():
    phases = [{component.phase for _, component, _ in group} for group in DEFAULT]
    assert phases == [{phase} for phase in PHASES]


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_processor_registers_under_its_name_from_the_file_of_that_name(name):
    module = importlib.import_module(f"headrace.plugins.{name.replace('-', '_')}")
    offered = []
    module.register_logits_processor(lambda *args, **kwargs: offered.append((*args, kwargs["params"])))
    assert offered == [(name, *COMPONENTS[name])]
    assert module.headrace_api == 1
