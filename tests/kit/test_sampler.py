"""The contract of samplers: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest
import torch

from headrace.plugins.categorical import Categorical
from headrace.testing import SamplerContract, run
from tests.kit.faults import contract_of, failures


class TestCategorical(SamplerContract):
    plugin = "categorical"


class Good(Categorical):
    def __init__(self):
        super().__init__(None, None)


class Sticky(Good):
    """Goes on from what its slot drew before."""

    def __init__(self):
        super().__init__()
        self.drawn = {}

    def sample(self, logits, uniforms, rows):
        for row, slot in enumerate(rows.slots):
            logits = logits.clone()
            logits[row, self.drawn.get(slot, 0)] += 5
        ids = super().sample(logits, uniforms, rows)
        self.drawn.update(zip(rows.slots, ids.tolist(), strict=True))
        return ids


def by(change):
    """A sampler that does as the good one does, after *change* to its arguments."""
    return type("Faulty", (Good,), {"sample": lambda self, *given: Categorical.sample(self, *change(*given))})


def clamped(logits, uniforms, rows):
    return logits.clamp(min=-60), torch.where(uniforms == 0, uniforms, uniforms), rows


def nearest(self, logits, uniforms, rows):
    return (uniforms * logits.shape[1]).long()


class InPlace(Good):
    def sample(self, logits, uniforms, rows):
        return super().sample(logits.mul_(1.0).sub_(1.0), uniforms, rows)


class TakesNumbers(Good):
    def sample(self, logits, uniforms, rows):
        ids = super().sample(logits, uniforms, rows)
        uniforms.zero_()
        return ids


class Strikes(Good):
    """Rules out what it has drawn."""

    def sample(self, logits, uniforms, rows):
        ids = super().sample(logits, uniforms, rows)
        logits[torch.arange(len(ids)), ids] = float("-inf")
        return ids


FAULTS = {
    "test_it_draws_one_token_of_the_vocabulary_for_each_row": [
        type("Int32", (Good,), {"sample": lambda self, *given: Categorical.sample(self, *given).int()}),
        type("Beyond", (Good,), {"sample": lambda self, *given: Categorical.sample(self, *given) + 300}),
    ],
    "test_the_same_numbers_draw_the_same_tokens": [
        type("Own", (Good,), {"sample": lambda self, x, u, rows: x.softmax(-1).multinomial(1)[:, 0]})
    ],
    "test_its_draws_have_the_distribution_it_promises": [
        by(lambda x, u, rows: (x * 1.05, u, rows)),
        by(lambda x, u, rows: (x, u * u, rows)),
        type("Greedy", (Good,), {"sample": lambda self, x, u, rows: x.argmax(-1)}),
    ],
    "test_what_is_ruled_out_is_never_drawn": [
        by(clamped),
        type("Nearest", (Good,), {"sample": nearest}),
    ],
    "test_a_row_is_the_same_alone_and_in_company": [by(lambda x, u, rows: (x, u.flip(0), rows))],
    "test_the_order_of_rows_does_not_matter": [by(lambda x, u, rows: (x, (u + torch.arange(len(u)) / 7) % 1, rows))],
    "test_a_new_owner_finds_nothing_of_the_last_one": [Sticky],
    "test_it_leaves_what_it_is_given_as_it_is": [InPlace, TakesNumbers, Strikes],
}


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("sampler", Good)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), [(test, each) for test, all_ in FAULTS.items() for each in all_])
def test_a_planted_fault_is_caught(test, component):
    torch.manual_seed(0)
    assert test in failures(contract_of("sampler", component), [test])


def test_a_sampler_of_another_distribution_says_which():
    sharper = by(lambda x, u, rows: (x * 2, u, rows))
    expected = {"expected": lambda self, logits, params: (logits.double() * 2).softmax(-1)}
    assert failures(contract_of("sampler", sharper, **expected)) == {}
