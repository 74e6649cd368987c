"""The contract of the slot `quantizer`: products within a stated error, each row by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from .contract import Contract, ensure


class QuantizerContract(Contract):
    """Multiplies random matrices, and compares with float64.

    Attributes:
        max_error: of a product, relative to its size: the norm of the difference over the norm of the product.
        shapes: (out_features, in_features) to try.
        tolerance: relative difference that rounding may make between a row alone and one in company.
    """

    slot = "quantizer"
    max_error: ClassVar[float] = 0.15
    shapes: ClassVar[Sequence[tuple[int, int]]] = ((1, 32), (33, 64), (64, 96), (128, 256))
    tolerance: ClassVar[float] = 1e-4

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """What a fresh component makes of *weight*, of which it gets a copy."""
        added = None if bias is None else bias.clone()
        return self.build().linear("layers.0.q", weight.clone(), added)

    def cases(self) -> st.SearchStrategy[tuple[int, int, int]]:
        """(out_features, in_features, seed)."""
        return st.tuples(st.sampled_from(list(self.shapes)), st.integers(0, 2**16)).map(
            lambda each: (*each[0], each[1])
        )

    def test_a_product_is_within_the_stated_error(self) -> None:
        """Of random weights and weights with outliers, by one row and by many."""

        def check(case: tuple[int, int, int], num_rows: int) -> None:
            weight, x = _random(case, num_rows)
            wanted = x.double() @ weight.double().T
            error = _distance(self.linear(weight)(x.clone()), wanted)
            ensure(error <= self.max_error, f"the error of a product must be <= {self.max_error}, found {error:.3g}")

        self.for_all(self.cases(), st.sampled_from([1, 2, 7, 33]), check=check)

    def test_the_error_is_not_biased(self) -> None:
        """Rounding to one side adds up over layers: the mean error must be small beside the error."""
        generator = torch.Generator().manual_seed(3)
        weight = torch.rand(256, 256, generator=generator) + 0.05
        made = self.linear(weight)(torch.eye(256)).double().T - weight.double()
        spread, mean = made.abs().mean().item(), abs(made.mean().item())
        ensure(mean <= 0.25 * spread + 1e-6, f"errors must cancel out; their mean is {mean:.3g} of {spread:.3g}")

    def test_it_gives_back_float32_of_the_right_shape(self) -> None:
        """Also of no rows at all, which a step without samples has."""
        for out_features, in_features in self.shapes:
            weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1))
            for num_rows in (0, 1, 5):
                y = self.linear(weight)(torch.ones(num_rows, in_features))
                found = (list(y.shape), y.dtype)
                wanted = ([num_rows, out_features], torch.float32)
                ensure(found == wanted, f"the product must be {wanted}, found {found}")

    def test_a_row_is_the_same_alone_and_in_company(self) -> None:
        def check(case: tuple[int, int, int], num_rows: int) -> None:
            weight, x = _random(case, num_rows)
            x[1::2] *= 100
            linear = self.linear(weight)
            together = linear(x.clone())
            for row in range(num_rows):
                error = _distance(together[row], linear(x[row : row + 1].clone())[0].double())
                ensure(
                    error <= self.tolerance, f"a row must be the same alone and in company, it differs by {error:.3g}"
                )

        self.for_all(self.cases(), st.integers(2, 9), check=check)

    def test_a_bias_is_added(self) -> None:
        def check(case: tuple[int, int, int]) -> None:
            weight, x = _random(case, 3)
            bias = torch.randn(len(weight), generator=torch.Generator().manual_seed(5)) * 10
            found = self.linear(weight, bias)(x.clone())
            error = (found - self.linear(weight)(x.clone()) - bias).abs().max().item()
            ensure(error <= 1e-2, f"the bias must be added to every row, it is wrong by {error:.3g}")

        self.for_all(self.cases(), check=check)

    def test_zeros_stay_zero_and_nothing_becomes_nan(self) -> None:
        """Rows of zeros have no scale, neither in the weights nor in what they are multiplied with."""
        for out_features, in_features in self.shapes:
            weight, x = _random((out_features, in_features, 2), 3)
            weight[0] = 0
            x[1] = 0
            for scale in (1.0, 1e-6, 1e4):
                y = self.linear(weight * scale)(x)
                ensure(y.isfinite().all(), f"products of finite numbers must be finite, at weights of {scale:g}")
                zero = y[:, 0].abs().max().item() == 0 and y[1].abs().max().item() == 0
                ensure(zero, "a row of zeros must give zeros")

    def test_it_leaves_what_it_is_given_as_it_is(self) -> None:
        """The embedding's weight may be the head's too, and a row is still needed."""

        def check(case: tuple[int, int, int]) -> None:
            weight, x = _random(case, 3)
            bias = torch.ones(len(weight))
            given = (weight.clone(), bias.clone(), x.clone())
            linear = self.build().linear("head", given[0], given[1])
            first = linear(given[2]).clone()
            same = all(torch.equal(a, b) for a, b in zip(given, (weight, bias, x), strict=True))
            ensure(same, "linear must not write to the weight, the bias or what it is multiplied with")
            ensure(torch.equal(linear(given[2]), first), "the same rows must give the same product again")

        self.for_all(self.cases(), check=check)

    def test_two_matrices_do_not_mix(self) -> None:
        """Also of one name, for several models may be loaded."""
        weight, x = _random((*self.shapes[-1], 4), 3)
        quantizer = self.build()
        first = quantizer.linear("layers.0.q", weight.clone(), None)
        before = first(x).clone()
        quantizer.linear("layers.0.q", -weight, None)(x)
        ensure(torch.equal(first(x), before), "a matrix must not change when another one is taken over")


def _random(case: tuple[int, int, int], num_rows: int) -> tuple[Tensor, Tensor]:
    """Weights and rows; every third matrix has outliers."""
    out_features, in_features, seed = case
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    if seed % 3 == 0:
        weight[:, seed % in_features] *= 8
    return weight, torch.randn(num_rows, in_features, generator=generator)


def _distance(found: Tensor, wanted: Tensor) -> float:
    size = float(wanted.norm())
    difference = float((found.double() - wanted).norm())
    # Errors of a product that nearly cancels out are measured by what a product of this length usually is.
    return difference / max(size, 0.1 * math.sqrt(wanted.numel()))
