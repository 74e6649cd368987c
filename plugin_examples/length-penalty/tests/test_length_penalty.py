from array import array

import headrace_length_penalty
import pytest
import torch

from headrace.hooks.messages import Admit
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Rows
from headrace.testing import LogitsProcessorContract

END = 7


class TestLengthPenalty(LogitsProcessorContract):
    plugin = headrace_length_penalty
    params = ({"start": 2, "decay": 1.1}, {"start": 0, "decay": 10}, {"decay": 1})


def applied(logits, count, start, decay):
    processor = headrace_length_penalty.LengthPenalty(None, None)
    ids = array("i", [1] * count)
    admitted = Admit(
        slot=0,
        choice=0,
        params=SamplingParams(),
        chain=(),
        end_ids=frozenset([END]),
        prompt_ids=array("i", [1]),
        output_ids=ids,
    )
    processor.admit(0, headrace_length_penalty.Params(start=start, decay=decay), admitted)
    return processor.apply(logits.clone(), Rows([0], [count], None))


def test_the_end_grows_by_the_formula_and_nothing_else_changes():
    logits = torch.linspace(-2, 2, 10)[None]
    found = applied(logits, count=7, start=5, decay=1.5)
    assert found[0, END].item() == pytest.approx(logits[0, END].item() * (1 + (1.5**2 - 1)))
    found[0, END] = logits[0, END]
    assert torch.equal(found, logits)


def test_nothing_changes_before_its_start():
    logits = torch.linspace(-2, 2, 10)[None]
    assert torch.equal(applied(logits, count=5, start=5, decay=1.5), logits)


@pytest.mark.parametrize("count", [3, 6, 12])
def test_it_does_what_transformers_does(count):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(1))
    # There, a length has the prompt in it: one token here.
    theirs = transformers.ExponentialDecayLengthPenalty((4, 1.3), END, input_ids_seq_length=1)
    expected = theirs(torch.ones(1, 1 + count, dtype=torch.int64), logits.clone())
    torch.testing.assert_close(applied(logits, count, start=4, decay=1.3), expected)
