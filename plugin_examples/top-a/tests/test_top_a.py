import torch
from top_a import Params, TopA

from headrace.hooks.protocols import Context, Rows, SamplingContext
from headrace.testing import LogitsProcessorContract


class TestTopA(LogitsProcessorContract):
    plugin = "top_a"
    name = "top-a"
    params = ({"ratio": 0.2}, {"ratio": 0.5, "power": 1.0}, {"ratio": 0})


def test_it_keeps_what_the_formula_keeps():
    processor = TopA(Context(sampling=SamplingContext(vocab_size=4, num_slots=2)), None)
    processor.admit(1, Params(ratio=0.4, power=1.0), None)
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = processor.apply(logits, Rows([1], [0], None)).isfinite()
    assert kept.tolist() == [[True, True, False, False]]
