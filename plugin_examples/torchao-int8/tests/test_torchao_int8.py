from importlib.util import find_spec

import pytest
import torch

from headrace.testing import QuantizerContract

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install torchao")


class TestTorchaoInt8(QuantizerContract):
    plugin = "headrace_torchao_int8"


def test_a_matrix_takes_a_quarter_of_its_memory():
    import headrace_torchao_int8

    product = headrace_torchao_int8.TorchaoInt8(None, None).linear("layers.0.q", torch.ones(64, 128), None)
    kept = product._module.weight
    assert (kept.qdata.dtype, kept.qdata.numel()) == (torch.int8, 64 * 128)
