"""The fused draw against its definition, row by row, with a sort and running sums in float64."""

from __future__ import annotations

import ctypes
import math
from array import array

import numpy as np
import pytest
import torch

from headrace.core.kernels.native import abi
from headrace.core.kernels.native.draw import Drawer, slots
from headrace.core.uniform import uniforms
from headrace.hooks.messages import Fork
from headrace.plugins.presence_frequency import PresenceFrequency
from headrace.plugins.repetition import Repetition
from tests.native.compiled import DIALECTS, pytestmark
from tests.sampling.chains import Line, Stranger

__all__ = ["pytestmark"]


@pytest.fixture(scope="module", params=DIALECTS)
def engine(request):
    """The library's threads, without a model."""
    lib = abi.library()
    program = abi.Program()
    made = lib.hr_create(ctypes.byref(program), request.param.encode(), 2, 100)
    yield made
    lib.hr_destroy(made)


def defined(row, temperature, top_k, top_p, min_p, uniform):
    """The id, and how near the number came to a border of the running sum."""
    x = row.double().numpy()
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[x[order] > -math.inf]
    weights = np.exp((x[order] - x[order[0]]) / temperature)
    if top_k > 0:
        order, weights = order[:top_k], weights[:top_k]
    if top_p < 1:
        before = np.cumsum(weights) - weights
        kept = before < (top_p - 1e-6) * weights.sum()
        kept[0] = True
        order, weights = order[kept], weights[kept]
    if min_p > 0:
        kept = weights >= min_p * (1 - 1e-6)
        order, weights = order[kept], weights[kept]
    by_id = np.argsort(order)
    order, sums = order[by_id], np.cumsum(weights[by_id]) / weights.sum()
    hit = int(np.searchsorted(sums, uniform, side="right"))
    return int(order[min(hit, len(order) - 1)]), float(np.abs(sums - uniform).min())


def ask(engine, logits, uniforms, **params):
    rows = slots(len(logits))
    for name, value in params.items():
        rows[name] = value
    rows["uniform"] = uniforms
    return Drawer(engine).draw(logits, rows, list(range(len(logits))))


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 300, "top_p": 0.5},
]


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 4099])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_what_is_drawn_is_what_the_definition_says(engine, params, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator) * torch.rand(40, 1, generator=generator) * 8
    logits[7, ::3] = -math.inf
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64).numpy()
    before = logits.clone()

    ids, tops = ask(engine, logits, uniforms, **params)

    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    for row, (found, uniform) in enumerate(zip(ids, uniforms, strict=True)):
        expected, near = defined(logits[row], uniform=uniform, **full)
        assert found == expected or near < 1e-5, f"row {row}"
    assert tops == pytest.approx(logits.amax(-1).tolist())
    assert torch.equal(logits, before)


def test_a_flat_row_is_cut_where_the_sum_is_reached(engine):
    logits = torch.zeros(3, 4000)

    ids, _ = ask(engine, logits, [0.0, 0.5, 1 - 2.0**-53], top_p=0.25)

    assert ids[0] == 0
    assert abs(ids[1] - 500) <= 1
    assert 998 <= ids[2] <= 1000


def test_of_equals_the_smaller_ids_are_kept(engine):
    logits = torch.full((50, 200), -1.0)
    logits[:, 100:110] = 2.0

    ids, _ = ask(engine, logits, np.linspace(0, 0.999, 50), top_k=3)

    assert set(ids) == {100, 101, 102}


def test_greedy_takes_the_first_of_the_likeliest(engine):
    logits = torch.randn(6, 500)
    logits[:, [77, 300]] = 50.0

    ids, _ = ask(engine, logits, np.zeros(6), temperature=0.0)

    assert ids == [77] * 6


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_something_that_is_no_number_draws_nothing_and_the_others_do(engine, value):
    logits = torch.randn(4, 333)
    logits[1, 332] = value
    logits[3] = -math.inf

    ids, tops = ask(engine, logits, np.full(4, 0.5), top_k=5)

    assert [token_id >= 0 for token_id in ids] == [True, False, True, False]
    assert not math.isfinite(tops[1])
    assert tops[3] == -math.inf


def test_what_is_ruled_out_is_never_drawn(engine):
    logits = torch.full((100, 300), -math.inf)
    logits[:, 250] = -3.0
    logits[:, 13] = -5.0

    for params in SETTINGS:
        ids, _ = ask(engine, logits, np.linspace(0, 1 - 2.0**-53, 100), **params)
        assert set(ids) <= {13, 250}


def test_shares_of_draws_follow_the_probabilities(engine):
    """Chi-square over 20 tokens, 0.999 quantile for 19 degrees of freedom."""
    logits = torch.linspace(-2, 2, 20).expand(20_000, 20).contiguous()
    uniforms = np.random.default_rng(8).random(20_000)

    ids, _ = ask(engine, logits, uniforms)

    expected = logits[0].softmax(0).numpy() * len(ids)
    found = np.bincount(ids, minlength=20)
    assert ((found - expected) ** 2 / expected).sum() < 43.8


def test_numbers_are_those_of_the_counter(engine):
    """A token is where its running sum passes the number; 10⁵ equal tokens tell five digits of it."""
    seeds, positions, choices = [0, 1, 2**64 - 1, 12345, 7], [0, 5, 2**33, 1, 99], [0, 3, 1, 0, 2**31]
    rows = slots(5)
    rows["seed"], rows["position"], rows["choice"] = np.array(seeds, np.uint64), positions, choices

    ids, _ = Drawer(engine).draw(torch.zeros(5, 100_000), rows, list(range(5)))

    assert [token_id / 1e5 for token_id in ids] == pytest.approx(uniforms(seeds, choices, positions).tolist(), abs=2e-5)


@pytest.mark.parametrize("params", [{}, {"top_k": 7}, {"top_p": 0.8, "temperature": 0.7}], ids=str)
def test_a_row_draws_alone_what_it_draws_in_company(engine, params):
    logits = torch.randn(9, 1000)
    together = ask(engine, logits, np.linspace(0, 0.9, 9), **params)

    alone = [ask(engine, logits[i : i + 1].clone(), [0.9 * i / 8], **params)[0][0] for i in range(9)]

    assert together[0] == alone


ASKED = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.3, "seed": 6, "chain": {"top-k": {"k": 40}}},
    {"seed": 7, "chain": {"top-p": {"p": 0.8}, "min-p": {"p": 0.01}}},
]


def state_with(engine, **also):
    line = Line(500, drawer=Drawer(engine))
    for slot, params in enumerate(ASKED):
        line.admit(slot, **params, **also)
    return line


def test_rows_that_need_nothing_else_draw_in_one_call_what_the_long_way_draws(engine, monkeypatch):
    # Who asks for a logarithm goes the long way.
    short, long = state_with(engine), state_with(engine, logprobs=1)
    steps = torch.randn(20, 4, 500, generator=torch.Generator().manual_seed(3)) * 3
    rows = [2, 0, 3, 1]
    wanted = [long.draw(logits, rows, [position] * 4).token_ids for position, logits in enumerate(steps)]
    monkeypatch.setattr("headrace.core.sampling.DrawRows", None)
    for position, logits in enumerate(steps):
        assert short.draw(logits, rows, [position] * 4).token_ids == wanted[position] == short.state.last_tokens(rows)
    assert len({tuple(each) for each in zip(*wanted, strict=True)}) == 4


def test_one_that_fails_sends_its_step_the_long_way_and_nothing_is_lost_or_counted_twice(engine):
    line, logits = state_with(engine), torch.randn(4, 500, generator=torch.Generator().manual_seed(4))
    before = line.draw(logits, range(4), [0] * 4).token_ids
    logits[1, 3] = math.nan
    draws = line.draw(logits, range(4), [1] * 4)
    assert list(draws.errors) == [1]
    assert draws.token_ids[1] == -1
    assert all(token_id >= 0 for row, token_id in enumerate(draws.token_ids) if row != 1)
    logits[1, 3] = 0
    assert list(line.draw(logits, range(4), [2] * 4).errors) == [1]  # A slot that failed stays so.
    assert line.draw(logits[:1], [0], [3]).token_ids[0] == before[0] == int(logits[0].argmax())
    assert line.state.history.output(0).tolist() == [before[0]] * 4
    assert line.state.history.output(1).tolist() == [before[1]]


def test_the_history_that_a_processor_sees_has_what_was_drawn_before_it_was_asked(engine):
    line = Line(50, drawer=Drawer(engine))
    line.admit(0, temperature=0.0, prompt=(9,))
    seen = line.state.history.seen(0).tolist()
    for position, token_id in enumerate([3, 4, 3]):
        logits = torch.zeros(1, 50)
        logits[0, token_id] = 1
        assert line.draw(logits, [0], [position]).token_ids == [token_id]
    ids, counts = line.state.history.output_counts(0)
    assert seen == [9]
    assert sorted(line.state.history.seen(0).tolist()) == [3, 4, 9]
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {3: 2, 4: 1}


def test_a_row_that_needs_more_gets_it_in_the_company_of_those_that_do_not(engine):
    line = Line(50, drawer=Drawer(engine))
    line.admit(0, temperature=0.0)
    line.admit(1, temperature=0.0, chain={"logit-bias": {"bias": {7: -100.0}}})
    logits = torch.zeros(2, 50)
    logits[:, 7], logits[:, 8] = 2, 1
    assert line.draw(logits, [0, 1], [0, 0]).token_ids == [7, 8]
    assert line.draw(logits[1:], [1], [1]).token_ids == [8]
    assert line.draw(logits[:1], [0], [1]).token_ids == [7]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_logits_of_another_number_of_rows_are_refused_before_compiled_code_reads_them(engine, num_rows):
    line = Line(50, drawer=Drawer(engine))
    for slot in (0, 1):
        line.admit(slot, temperature=0.0)
    with pytest.raises(ValueError, match="a row is needed for each of 2 slots"):
        line.draw(torch.zeros(num_rows, 50), [0, 1], [0, 0])


PENALISED = [
    {"temperature": 0.0, "chain": {"repetition": {"penalty": 1.3}}},
    {
        "temperature": 0.8,
        "seed": 2,
        "chain": {"repetition": {"penalty": 1.1}, "top-k": {"k": 40}, "top-p": {"p": 0.95}},
    },
    {"seed": 3, "chain": {"presence-frequency": {"presence": 0.5, "frequency": -0.3}}},
    {"seed": 4, "chain": {"repetition": {"penalty": 0.8}, "presence-frequency": {"presence": -1.0, "frequency": 0.7}}},
    # What a slot uses between a penalty and the temperature, or before both.
    {"seed": 5, "chain": {"repetition": {"penalty": 1.5}, "min-tokens": {"count": 10}}, "end_ids": frozenset((3, 40))},
    {"seed": 6, "chain": {"repetition": {"penalty": 1.5}, "logit-bias": {"bias": {7: 4.0, 8: -3.0}}}},
    {"temperature": 0.0},
]


def penalised(drawer, **also):
    line = Line(60, drawer=drawer)
    for slot, params in enumerate(PENALISED):
        line.admit(slot, prompt=(5, 9, 5, 7), **({"output": (11, 7, 11)} if slot % 2 else {}), **params, **also)
    return line


def test_penalties_within_the_call_are_those_of_the_processors(engine, monkeypatch):
    """Forty tokens of which many come again, with a copy and a slot that is admitted anew on the way."""
    called = []
    for penalty in (Repetition, PresenceFrequency):

        def apply(self, logits, rows, apply=penalty.apply):
            called.append(list(rows.slots))
            return apply(self, logits, rows)

        monkeypatch.setattr(penalty, "apply", apply)
    quick, slow = penalised(Drawer(engine)), penalised(None)
    rows, generator = [4, 0, 6, 3, 1, 5, 2], torch.Generator().manual_seed(5)
    for position in range(40):
        if position == 12:
            quick.state.apply_ops((Fork(source=3, slot=2, choice=1),))
            slow.state.apply_ops((Fork(source=3, slot=2, choice=1),))
        if position == 25:
            quick.admit(1, prompt=(3, 3), **PENALISED[3])
            slow.admit(1, prompt=(3, 3), **PENALISED[3])
        logits = torch.randn(7, 60, generator=generator) * 2

        called.clear()
        drawn = quick.draw(logits, rows, [position] * 7).token_ids

        # Only who uses another processor between its penalty and the temperature has that called.
        assert called == [[4]], position
        assert drawn == slow.draw(logits, rows, [position] * 7).token_ids, position
    assert set(quick.state.history.seen(2).tolist()) == set(slow.state.history.seen(2).tolist())


def test_a_step_that_goes_the_long_way_after_all_has_its_penalties_once(engine):
    """A row without a token sends all rows of its step another way, after their logits were changed and put back."""
    quick, slow = penalised(Drawer(engine)), penalised(None)
    logits = torch.randn(7, 60, generator=torch.Generator().manual_seed(6)) * 2
    logits[6, 1] = math.nan
    rows = [0, 1, 2, 3, 5, 6]  # None of which needs a processor called but the one with a bias.
    for position in range(3):
        drawn, wanted = (line.draw(logits[rows], rows, [position] * 6) for line in (quick, slow))
        assert drawn.token_ids == wanted.token_ids
        assert list(drawn.errors) == list(wanted.errors) == [5]


@pytest.mark.parametrize(
    "penalty", [{"repetition": 1.7}, {"presence": 1.0, "frequency": 2.0, "repetition": 0.5}], ids=str
)
def test_logits_are_what_they_were_after_a_penalty(engine, penalty):
    logits = torch.randn(3, 300)
    logits[1, 7] = -math.inf
    before, tokens = logits.clone(), array("i", [7, 8, 7, 299, 0, 8, 8, -1, 300])

    ask(engine, logits, [0.3, 0.5, 0.7], tokens=tokens.buffer_info()[0], num_tokens=9, num_prompt=3, **penalty)

    assert torch.equal(logits, before)


SAYINGS = [{"repetition": "penalty", "temperature": "value"}, {"nonsense": "x"}, ("temperature", "value"), {}]


@pytest.mark.parametrize("fused", SAYINGS, ids=str)
def test_who_says_to_be_what_no_part_of_the_call_is_is_called(engine, fused):
    stranger = Stranger()
    stranger.fused = fused
    line = Line(50, drawer=Drawer(engine), strangers=[stranger])
    line.admit(0, temperature=0.0, strangers=[0], chain={"repetition": {"penalty": 2.0}}, prompt=(3,))
    logits = torch.zeros(1, 50)
    logits[0, 3], logits[0, 4] = 1.5, 1.0

    assert line.draw(logits, [0], [0]).token_ids == [4]
    assert [slots for _, slots in stranger.shown] == [[0]]
