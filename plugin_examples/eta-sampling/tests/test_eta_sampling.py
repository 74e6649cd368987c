import headrace_eta_sampling
import pytest
import torch

from headrace.hooks.protocols import Context, Rows, SamplingContext
from headrace.testing import LogitsProcessorContract


class TestEtaSampling(LogitsProcessorContract):
    plugin = headrace_eta_sampling
    params = ({"epsilon": 2e-4}, {"epsilon": 0.05}, {"epsilon": 0})


def applied(epsilon, logits):
    processor = headrace_eta_sampling.EtaSampling(Context(sampling=SamplingContext(vocab_size=50, num_slots=2)), None)
    processor.admit(1, headrace_eta_sampling.Params(epsilon=epsilon), None)
    return processor.apply(logits.clone(), Rows([1] * len(logits), [0] * len(logits), None))


def test_it_keeps_what_the_formula_keeps():
    # Entropy ln 4: eta = min(0.25, 0.5 · 1/4) = 0.125. Entropy 0: eta = min(0.25, 0.5) = 0.25.
    logits = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]).log()
    assert applied(0.25, logits).isfinite().tolist() == [[True] * 4, [True, False, False, False]]


@pytest.mark.parametrize("epsilon", [2e-3, 0.05, 0.4])
def test_it_keeps_what_transformers_keeps(epsilon):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2)) * 3
    expected = transformers.EtaLogitsWarper(epsilon)(None, logits.clone())
    assert torch.equal(applied(epsilon, logits).isfinite(), expected.isfinite())
