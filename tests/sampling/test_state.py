import math

import pytest
import torch

from headrace.hooks.messages import UNKNOWN_TOKEN, Fork, Release
from tests.sampling.chains import Line, Stranger

INF = math.inf


def test_greedy_takes_the_likeliest_and_the_smallest_of_equals():
    line = Line(4)
    line.admit(0, temperature=0)
    line.admit(1, temperature=1e-6)
    assert line.draw([[0, 3, 1, 2], [0, 1, 5, 5]], [0, 1]).token_ids == [1, 2]
    assert line.spy.logits == []


def test_greedy_is_untouched_by_temperature_and_truncation_but_not_by_bias():
    truncating = Stranger(lambda logits, rows: logits.fill_(0), phase="truncate")
    line = Line(4, strangers=[truncating])
    line.admit(0, temperature=0, strangers=[0], chain={"logit-bias": {"bias": {3: 9}}})
    assert line.draw([[5, 0, 0, 0]], [0]).token_ids == [3]
    assert truncating.shown == []


def test_a_draw_depends_on_seed_choice_and_position():
    line = Line(1000, num_slots=3)
    line.admit(0, seed=1)
    line.admit(1, seed=2)
    line.admit(2, seed=1, choice=1)
    rows = torch.zeros(4, 1000)
    drawn = line.draw(rows, [0, 1, 2, 0], [0, 0, 0, 1]).token_ids
    assert len(set(drawn)) == 4
    line.admit(1, seed=1)
    assert line.draw(rows[:1], [1]).token_ids == drawn[:1]


def test_a_preempted_sequence_goes_on_as_if_it_had_stayed():
    rows = torch.randn(6, 1, 50, generator=torch.Generator().manual_seed(0))
    chain = {"repetition": {"penalty": 1.5}, "presence-frequency": {"frequency": 0.7}, "top-p": {"p": 0.9}}
    stayed, left = Line(50), Line(50)
    stayed.admit(0, chain=chain)
    tokens = [stayed.draw(row, [0], [i]).token_ids[0] for i, row in enumerate(rows)]
    left.admit(3, chain=chain, output=tokens[:4])
    assert left.state.last_token(3) == tokens[3]
    assert [left.draw(rows[i], [3], [i]).token_ids[0] for i in (4, 5)] == tokens[4:]


def test_the_last_token_is_known_by_slot():
    line = Line(3)
    line.admit(0, temperature=0)
    line.admit(1, temperature=0, output=[2, 1])
    assert [line.state.last_token(slot) for slot in (0, 1)] == [UNKNOWN_TOKEN, 1]
    line.draw([[0, 0, 9]], [0])
    assert line.state.last_tokens([1, 0, 1]) == [1, 2, 1]


def test_a_fork_starts_from_its_source_and_draws_as_its_own_choice():
    line = Line(200)
    chain = {"presence-frequency": {"presence": 2}}
    line.admit(0, chain=chain)
    first = line.draw(torch.zeros(1, 200), [0]).token_ids
    line.state.apply_ops((Fork(source=0, slot=5, choice=1),))
    assert line.state.last_token(5) == first[0]
    forked = line.draw(torch.zeros(2, 200), [0, 5], [1, 1]).token_ids
    whole = Line(200)
    whole.admit(5, chain=chain, choice=1, output=first)
    assert forked[1:] == whole.draw(torch.zeros(1, 200), [5], [1]).token_ids
    assert forked[0] != forked[1]


def test_choice_0_draws_what_a_single_one_draws():
    alone, several = Line(500), Line(500)
    alone.admit(0, seed=7)
    several.admit(0, seed=7, n=3)
    several.state.apply_ops(tuple(Fork(source=0, slot=choice, choice=choice) for choice in (1, 2)))
    drawn = several.draw(torch.zeros(3, 500), [0, 1, 2]).token_ids
    assert drawn[:1] == alone.draw(torch.zeros(1, 500), [0]).token_ids
    assert len(set(drawn)) == 3


def test_a_slot_keeps_nothing_of_its_last_owner():
    line = Line(4)
    line.admit(0, temperature=0, chain={"logit-bias": {"bias": {3: 50}}, "min-tokens": {"count": 9}}, end_ids={0})
    line.state.apply_ops((Release(slot=0), line.op(0, temperature=0)))
    assert line.draw([[1, 0, 0, 0]], [0]).token_ids == [0]


def test_sa16_an_end_token_waits_for_min_tokens_and_no_longer():
    line = Line(5)
    line.admit(
        0,
        temperature=0,
        chain={"logit-bias": {"bias": {4: 100}}, "min-tokens": {"count": 4}},
        end_ids=frozenset({2, 4}),
        prompt=[1] * 30,
    )
    drawn = [line.draw([[1, 0, 3, 0, 0]], [0], [i]).token_ids[0] for i in range(5)]
    assert drawn == [0, 0, 0, 0, 4]


def test_several_rows_of_a_slot_draw_in_order_and_are_all_remembered():
    line = Line(4)
    line.admit(0, temperature=0, chain={"min-tokens": {"count": 1}}, end_ids={3})
    assert line.draw([[0, 1, 0, 5], [0, 0, 1, 5]], [0, 0], [0, 1]).token_ids == [1, 3]
    assert line.state.last_token(0) == 3


def test_a_step_without_rows_draws_nothing():
    assert Line(4).draw(torch.zeros(0, 4), []).token_ids == []


def test_inference_tensors_can_be_drawn_from():
    line = Line(4)
    line.admit(0, temperature=0.5, chain={"logit-bias": {"bias": {0: 1}}, "top-k": {"k": 1}})
    with torch.inference_mode():
        logits = torch.tensor([[5.0, 0, 0, 0]])
    assert line.state.draw(logits, [0], [0]).token_ids == [0]


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────────────────────────


def test_logprobs_are_the_models_own_whatever_the_chain_did():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0))
    expected = logits[0].log_softmax(-1)
    line = Line(20)
    line.admit(
        0,
        temperature=0.1,
        logprobs=3,
        chain={"logit-bias": {"bias": {5: 100}}, "top-k": {"k": 1}},
    )
    told = line.draw(logits, [0]).logprobs[0]
    assert told.logprob == pytest.approx(expected[5].item())
    assert list(told.top_ids) == expected.topk(3).indices.tolist()
    assert list(told.top_logprobs) == pytest.approx(expected.topk(3).values.tolist())


def test_logprobs_are_told_to_who_asked_and_as_many_as_asked():
    line = Line(30)
    for slot, count in enumerate((None, 0, 20)):
        line.admit(slot, logprobs=count)
    logprobs = line.draw(torch.zeros(3, 30), [0, 1, 2]).logprobs
    assert {row: len(told.top_ids) for row, told in logprobs.items()} == {1: 0, 2: 20}


def test_sa11_the_logprob_of_a_forced_token_is_never_infinite():
    def force(logits, rows):
        logits[:, 2] = 1e6
        return logits

    line = Line(4, strangers=[Stranger(force)])
    line.admit(0, temperature=0, logprobs=0, strangers=[0])
    assert line.draw([[0, 0, -INF, 0]], [0]).logprobs[0].logprob == -9999.0


def test_sa11_the_logprob_of_an_alternative_is_never_infinite():
    line = Line(4)
    line.admit(0, temperature=0, logprobs=4, chain={"logit-bias": {"bias": {0: 1}}})
    told = line.draw([[0, -INF, -INF, -1e9]], [0]).logprobs[0]
    assert told.logprob == 0
    assert told.top_logprobs == (0, -9999.0, -9999.0, -9999.0)


def test_after_a_wrong_guess_neither_a_token_nor_an_error_counts():
    logits = torch.full((4, 8), -5.0)
    for row, token in enumerate((3, 4, 6, 1)):
        logits[row, token] = 5.0
    logits[3] = math.nan
    line = Line(8, num_slots=3)
    line.admit(2, temperature=0)
    # Guessed: 3, which is right; 5, where 4 is drawn; and one more behind it.
    draws = line.state.draw(logits, [2, 2, 2, 2], [0, 1, 2, 3], [-1, 3, 5, 7])
    assert draws.token_ids == [3, 4, UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    assert draws.errors == {}
    assert line.state.last_token(2) == 4
