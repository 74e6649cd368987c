"""The contract of quantizers: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest
import torch

from headrace.hooks.testing.contract import run
from headrace.testing import QuantizerContract
from tests.kit.faults import contract_of, failures


class TestNone(QuantizerContract):
    plugin = "unquantized"
    name = "none"
    max_error = 1e-6


class Rows:
    """8 bits, a scale for each row."""

    def linear(self, name, weight, bias):
        scale = self.scale(weight)
        whole = self.round(weight / scale)
        return lambda x: self.multiply(x, whole, scale, bias)

    def scale(self, weight):
        return weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127

    def round(self, values):
        return values.round()

    def multiply(self, x, whole, scale, bias):
        y = x @ (whole * scale).T
        return y if bias is None else y + bias


def rows(**members):
    return type("Faulty", (Rows,), members)


def by_matrix(self, x, whole, scale, bias):
    """Rows are rounded by the largest of all."""
    step = x.abs().amax().clamp(min=1e-30) / 127 if len(x) else 1
    return Rows.multiply(self, (x / step).round() * step, whole, scale, bias)


def in_place(self, x, whole, scale, bias):
    return Rows.multiply(self, x.clamp_(-1, 1), whole, scale, bias)


class Named(Rows):
    def __init__(self):
        self.weights = {}

    def linear(self, name, weight, bias):
        self.weights[name] = (weight, bias)
        return lambda x: torch.nn.functional.linear(x, *self.weights[name])


def halve(self, name, weight, bias):
    return Rows.linear(self, name, weight.mul_(0.999), bias)


FAULTS = [
    ("test_a_product_is_within_the_stated_error", rows(round=lambda self, x: (x / 60).round() * 60)),
    ("test_the_error_is_not_biased", rows(round=lambda self, x: x.floor())),
    (
        "test_it_gives_back_float32_of_the_right_shape",
        rows(multiply=lambda self, x, w, s, b: x.double() @ (w * s).T.double()),
    ),
    ("test_a_row_is_the_same_alone_and_in_company", rows(multiply=by_matrix)),
    ("test_a_bias_is_added", rows(multiply=lambda self, x, w, s, b: Rows.multiply(self, x, w, s, None))),
    ("test_zeros_stay_zero_and_nothing_becomes_nan", rows(scale=lambda self, w: w.abs().amax(1, keepdim=True) / 127)),
    ("test_it_leaves_what_it_is_given_as_it_is", rows(multiply=in_place)),
    ("test_it_leaves_what_it_is_given_as_it_is", rows(linear=halve)),
    ("test_two_matrices_do_not_mix", Named),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("quantizer", Rows, max_error=0.05)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("quantizer", component, max_error=0.05), [test])
