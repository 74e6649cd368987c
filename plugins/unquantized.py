"""Quantizer `none`: weight matrices stay as they were read, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hooks.protocols import Context, Linear, Register
from ..hooks.registry import plugin

if TYPE_CHECKING:
    from torch import Tensor

headrace_api = 1


class FloatLinear:
    """`x · weightᵀ + bias`. The compiled kernels take *weight* and *bias* and multiply without calling this object."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        from torch.nn.functional import linear

        return linear(x, self.weight, self.bias)


class Unquantized:
    """Keeps `[out_features, in_features]` float32 and multiplies with torch."""

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """`x · weightᵀ + bias`, sharing the storage of *weight*."""
        return FloatLinear(weight, bias)


def _build(context: Context, options: None) -> Unquantized:
    return Unquantized()


@plugin
def register_quantizer(register: Register) -> None:
    """Offer `none`."""
    register("none", _build, doc="Weight matrices in float32, as they were read.")
