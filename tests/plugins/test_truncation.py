"""Processors that cut: typical, top-n-sigma and XTC, against transformers and the formulas as published."""

import pytest
import torch
import transformers

from tests.plugins.rig import admission, apply, build, finite, numbers, random_logits

SIZES = (1, 2, 50, 255, 256, 257, 5003)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_typical_equals_transformers(vocab_size, scale):
    logits = random_logits(vocab_size, 4, scale=scale)
    masses = [0.1, 0.5, 0.9, 0.99]
    result = apply("typical", logits, [{"p": mass} for mass in masses])
    for row, mass in enumerate(masses):
        theirs = transformers.TypicalLogitsWarper(mass=mass)(None, logits[row : row + 1].clone())[0]
        differing = (result[row].isfinite() != theirs.isfinite()).sum().item()
        # Sums of float32 are taken in another order: at the border one token may be judged otherwise.
        assert differing <= 1
        assert torch.equal(result[row][result[row].isfinite()], logits[row][result[row].isfinite()])


def test_typical_leaves_out_what_was_ruled_out_before():
    logits = torch.tensor([[1.0, -torch.inf, 0.9, 0.8, -torch.inf]])
    assert finite(apply("typical", logits, [{"p": 0.99}])[0]) == [0, 2, 3]


def test_typical_may_rule_out_the_likeliest_token():
    probabilities = torch.tensor([[0.4] + [0.03] * 20])
    assert 0 not in finite(apply("typical", probabilities.log(), [{"p": 0.3}])[0])


@pytest.mark.parametrize("vocab_size", SIZES)
def test_top_n_sigma_keeps_what_its_formula_keeps(vocab_size):
    logits = random_logits(vocab_size, 4)
    result = apply("top-n-sigma", logits, [{"n": n} for n in (0.1, 0.5, 1.0, 3.0)])
    for row, n in enumerate((0.1, 0.5, 1.0, 3.0)):
        wide = logits[row].double()
        floor = wide.max() - n * wide.std(correction=0)
        clear = (wide - floor).abs() > 1e-5
        assert torch.equal((result[row] > -torch.inf)[clear], (wide >= floor)[clear])


@pytest.mark.parametrize("temperature", [0.3, 4.0])
def test_top_n_sigma_keeps_the_same_at_any_temperature(temperature):
    logits = random_logits(1000, 3)
    kept, warmer = (apply("top-n-sigma", each, [{"n": 1.0}] * 3) for each in (logits, logits / temperature))
    assert [finite(row) for row in kept] == [finite(row) for row in warmer]


def exclude_top_choices(probabilities, threshold):
    """As its author wrote it, over a sorted row."""
    order = probabilities.argsort(descending=True, stable=True)
    removed = torch.zeros(len(order), dtype=torch.bool)
    removed[:-1] = probabilities[order][1:] >= threshold
    return sorted(order[~removed].tolist())


@pytest.mark.parametrize("vocab_size", SIZES)
def test_xtc_that_always_happens_equals_its_author(vocab_size):
    logits = random_logits(vocab_size, 6, scale=1.0)
    logits[5] = 0.0
    result = apply(
        "xtc",
        logits,
        [{"probability": 1.0, "threshold": 0.05}] * 6,
        make_uniforms=lambda stream: torch.zeros(6).double(),
    )
    for row in range(6):
        assert finite(result[row]) == exclude_top_choices(logits[row].softmax(-1), 0.05)


def test_xtc_happens_as_often_as_it_is_asked_to():
    logits = torch.tensor([[2.0, 1.9, 1.8, -3.0]]).repeat(4000, 1)
    result = apply("xtc", logits, [{"probability": 0.25}] * 4000, make_uniforms=numbers(4000))
    happened = (~result[:, 0].isfinite()).sum().item()
    assert abs(happened - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    # The least likely of the good ones, and the bad one, always stay.
    assert result[:, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("name", "params"),
    [("typical", {"p": 1.0}), ("top-n-sigma", {"n": 0}), ("xtc", {}), ("xtc", {"probability": 1.0, "threshold": 0.6})],
)
def test_a_row_whose_parameters_change_nothing_is_not_worked_on(name, params):
    bound = build("logits_processor", name)
    assert not bound.component.admit(0, bound.params(**params), admission(0))
