"""Quantizer `torchao-int8`: weight matrices in 8 bits, one scale a row, kept and multiplied by torchao.

Source: torchao's `Int8WeightOnlyConfig`, https://github.com/pytorch/ao, torchao/quantization.
"""

from __future__ import annotations

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import headrace

headrace_api = 1


class Product:
    """`[num_tokens, in_features]` float32 → `[num_tokens, out_features]` float32."""

    # Not the module itself: its `weight` claims to be float32, and whoever has such a weight is multiplied with it.
    def __init__(self, module):
        self._module = module

    def __call__(self, x):
        return self._module(x)


class TorchaoInt8:
    def __init__(self, context, options):
        pass

    def linear(self, name, weight, bias):
        out_features, in_features = weight.shape
        module = torch.nn.Linear(in_features, out_features, bias is not None, device="meta")
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            module.bias = torch.nn.Parameter(bias, requires_grad=False)
        quantize_(module, Int8WeightOnlyConfig(version=2))
        return Product(module)

    def bits(self, name, kind):
        return 8


@headrace.plugin
def register_quantizer(register):
    register("torchao-int8", TorchaoInt8, doc="8 bits a weight, one scale a row, by torchao.")
