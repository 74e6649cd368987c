"""Processors and samplers that take short cuts, against the same without any, over rows that are odd in some way."""

import math
import random

import pytest
import torch

from headrace.core.history import TokenHistory
from headrace.hooks.protocols import Rows
from tests.plugins.rig import Letters, admission, apply, build, random_logits
from tests.plugins.test_repetition_processors import dry
from tests.plugins.test_truncation import exclude_top_choices

INF = math.inf
SIZES = (1, 2, 3, 50, 257, 9001)
NUM_ROWS = 4


def odd_rows(vocab_size):
    """What they are → `[NUM_ROWS, vocab_size]`; at least one token of each row is not ruled out."""
    usual = random_logits(vocab_size, NUM_ROWS)
    peaks = usual.clone()
    peaks[:, :: max(1, vocab_size // 5)] += 12
    sparse = usual.masked_fill(torch.rand(usual.shape, generator=torch.Generator().manual_seed(1)) < 0.7, -INF)
    sparse[:, vocab_size // 2] = 1.0
    one = torch.full_like(usual, -INF)
    one[range(NUM_ROWS), [row % vocab_size for row in range(NUM_ROWS)]] = -50.0
    return {
        "usual": usual,
        "peaks": peaks,
        "nearly flat": usual * 0.01,
        "all equal": torch.zeros_like(usual),
        "ties": (usual / 2).round(),
        "ruled out": sparse,
        "one candidate": one,
        "far below 0": usual - 1000,
    }


def odd(*values):
    return [
        pytest.param(vocab_size, what, *((value,) if values else ()), id=f"{vocab_size}-{what}-{value}")
        for vocab_size in SIZES
        for what in odd_rows(1)
        for value in (values or ("",))
    ]


def typical(row, mass):
    """Tokens by their distance from the entropy, sorted; the last one that the sum needs, and its equals, stay."""
    scores = row.log_softmax(-1)
    weights = scores.exp()
    shift = (-scores + (weights * scores.nan_to_num(neginf=-1e30)).sum()).abs()
    values, order = shift.sort()
    reached = weights[order].double().cumsum(0)
    border = values[min(int((reached < torch.tensor(mass)).sum()), len(values) - 1)]
    return shift, border


@pytest.mark.parametrize(("vocab_size", "what", "mass"), odd(1e-9, 0.25, 0.5, 0.9, 1 - 1e-9))
def test_typical_keeps_what_a_sorted_row_would(vocab_size, what, mass):
    logits = odd_rows(vocab_size)[what]
    result = apply("typical", logits, [{"p": mass}] * NUM_ROWS)
    for before, after in zip(logits, result, strict=True):
        shift, border = typical(before, mass)
        # Two that are as far on either side of the entropy are told apart by the last bit of that sum.
        clear = ((shift - border).abs() > 4e-6 * max(1.0, float(border))) | (shift == border)
        assert torch.equal(after[clear], before.masked_fill(shift > border, -INF)[clear])
        assert torch.equal(after[after > -INF], before[after > -INF])


@pytest.mark.parametrize(("vocab_size", "what", "threshold"), odd(1e-9, 0.05, 0.25, 1 / 3, 0.5))
def test_xtc_excludes_what_a_sorted_row_would(vocab_size, what, threshold):
    logits = odd_rows(vocab_size)[what]
    given = [{"probability": 1.0, "threshold": threshold}] * NUM_ROWS
    result = apply("xtc", logits, given, make_uniforms=lambda stream: torch.zeros(NUM_ROWS).double())
    for before, after in zip(logits, result, strict=True):
        stays = torch.zeros(vocab_size, dtype=torch.bool)
        stays[exclude_top_choices(before.softmax(-1), threshold)] = True
        assert torch.equal(after, before.masked_fill(~stays, -INF))


@pytest.mark.parametrize("happens", [[0, 2], [3], []])
def test_xtc_leaves_rows_alone_where_it_does_not_happen(happens):
    logits = random_logits(100, NUM_ROWS)
    uniforms = torch.full((NUM_ROWS,), 0.5, dtype=torch.float64)
    uniforms[happens] = 0.4
    given = [{"probability": 0.5, "threshold": 0.01}] * NUM_ROWS
    result = apply("xtc", logits, given, make_uniforms=lambda stream: uniforms)
    assert [row for row in range(NUM_ROWS) if not torch.equal(result[row], logits[row])] == happens


@pytest.mark.parametrize(("vocab_size", "what", "tau"), odd(0.001, 3.0, 100.0))
def test_mirostat_draws_what_a_whole_row_in_double_would(vocab_size, what, tau):
    logits = odd_rows(vocab_size)[what]
    bound = build("sampler", "mirostat", vocab_size=vocab_size)
    for slot in range(NUM_ROWS):
        bound.component.admit(slot, bound.params(tau=tau, eta=1.0), admission(slot))
    mu, rows = [2 * tau] * NUM_ROWS, Rows(list(range(NUM_ROWS)), [0] * NUM_ROWS, TokenHistory(NUM_ROWS))
    for uniform in (0.0, 0.3, 1 - 2**-53):
        given = torch.full((NUM_ROWS,), uniform, dtype=torch.float64)
        drawn = bound.component.sample(logits.clone(), given, rows).tolist()
        for row, token_id in enumerate(drawn):
            weights = logits[row].double().softmax(-1)
            kept = (-weights.log2() <= mu[row]) | (logits[row] == logits[row].amax())
            left = torch.where(kept, weights, 0)
            left /= left.sum()
            # Where the running sum comes as near as this to the number, rounding decides.
            sums = torch.cat([torch.zeros(1).double(), left.cumsum(0)])
            assert sums[token_id] - 1e-6 <= uniform <= sums[token_id + 1] + 1e-6
            assert left[token_id] > 0
            mu[row] -= -math.log2(left[token_id]) - tau
            assert abs(float(bound.component._mu[row]) - mu[row]) < 1e-4
            mu[row] = float(bound.component._mu[row])


@pytest.mark.parametrize("alphabet", [1, 2, 4])
@pytest.mark.parametrize("window", [-1, 1, 2, 7, 40])
@pytest.mark.parametrize("allowed_length", [1, 3])
def test_dry_goes_on_token_by_token_as_if_it_read_everything_each_time(alphabet, window, allowed_length):
    draw, letters = random.Random(alphabet), Letters("abcd:")
    bound = build("logits_processor", "dry", vocab_size=5, tokenizer=letters)
    given = {"multiplier": 0.8, "base": 1.05, "allowed_length": allowed_length}
    texts = [[draw.randrange(alphabet) for _ in range(length)] for length in (1, 2, 30, 150)]
    history = TokenHistory(len(texts))

    def admit(slot, num_prompt):
        op = admission(slot, texts[slot][:num_prompt], texts[slot][num_prompt:])
        history.admit(slot, op.prompt_ids, op.output_ids)
        bound.component.admit(slot, bound.params(penalty_last_n=window, **given), op)

    for slot in range(len(texts)):
        admit(slot, len(texts[slot]))
    for step in range(90):
        # Not every one takes part in every step, and one comes back after it had to leave.
        slots = [slot for slot in range(len(texts)) if (step + slot) % 3]
        if step == 40:
            admit(3, 150)
        logits = random_logits(5, len(slots), seed=step)
        result = bound.component.apply(logits.clone(), Rows(slots, [0] * len(slots), history))
        for row, slot in enumerate(slots):
            seen = texts[slot] if window < 0 else texts[slot][-window:]
            assert torch.equal(result[row], logits[row] - dry(seen, {4}, vocab_size=5, **given))
            # A breaker now and then.
            texts[slot].append(draw.randrange(alphabet) if draw.random() < 0.97 else 4)
            history.append(slot, texts[slot][-1])


def test_dry_of_a_new_owner_of_a_slot_knows_nothing_of_the_last():
    bound = build("logits_processor", "dry", vocab_size=3)
    history = TokenHistory(1)
    for text, lost in (([0, 1, 0], [0, 0.5, 0]), ([2, 1, 2], [0, 0.5, 0]), ([2, 2, 1], [0, 0, 0])):
        op = admission(0, text[:1], text[1:])
        history.admit(0, op.prompt_ids, op.output_ids)
        assert bound.component.admit(0, bound.params(multiplier=0.5, allowed_length=1), op)
        result = bound.component.apply(torch.zeros(1, 3), Rows([0], [2], history))
        assert result.tolist() == [[-each for each in lost]]
