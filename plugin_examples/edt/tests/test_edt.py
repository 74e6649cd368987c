import math

import headrace_edt
import pytest
import torch

from headrace.testing import SamplerContract


def tensors(params):
    return (torch.tensor([value]) for value in (params.highest, params.theta))


class TestEdt(SamplerContract):
    plugin = headrace_edt
    params = ({}, {"highest": 0.7, "theta": 2.0}, {"theta": 0})
    vocab_size = 100
    num_draws = 5000

    def expected(self, logits, params):
        return headrace_edt.probabilities(logits[None], *tensors(params))[0]


def test_it_draws_at_the_temperature_of_the_paper():
    # One token and two at half its odds; a power of the odds is all that a temperature changes.
    odds = torch.tensor([[2.0, 1.0, 1.0]])
    p = (odds / 4)[0].tolist()
    temperature = 0.9 * 0.8 ** (0.5 / -sum(each * math.log(each) for each in p))
    first = 2 ** (1 / temperature)
    found = headrace_edt.probabilities(odds.log(), *tensors(headrace_edt.Params(highest=0.9, theta=0.5)))[0]
    assert found.tolist() == pytest.approx([first / (first + 2), 1 / (first + 2), 1 / (first + 2)])


def test_the_surer_the_model_is_the_colder_it_draws():
    sure, unsure = torch.tensor([[4.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    params = headrace_edt.Params()
    ratio = [headrace_edt.probabilities(row, *tensors(params))[0].log().diff().item() for row in (sure, unsure)]
    assert ratio[0] / -4 > ratio[1] / -1 > 1
