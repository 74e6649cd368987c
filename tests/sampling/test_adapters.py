"""Logits processors that were written for one request, several of them in one batch."""

import pytest
import torch
from msgspec import Struct
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from headrace.adapters import per_request
from headrace.hooks.protocols import Context, Rows, SamplingContext

VOCAB = 12
PROMPTS = {0: [1, 2, 3], 1: [4], 2: [5, 6]}
OUTPUTS = {0: [1, 2], 1: [], 2: [7, 5, 6]}


class History:
    def prompt(self, slot):
        return torch.tensor(PROMPTS[slot], dtype=torch.int64)

    def output(self, slot):
        return torch.tensor(OUTPUTS[slot], dtype=torch.int64)


class Params(Struct, forbid_unknown_fields=True):
    penalty: float = 1.0


def built(make, **rest):
    return per_request(make, phase="penalty", **rest)(
        Context(sampling=SamplingContext(vocab_size=VOCAB, num_slots=3)), None
    )


def rows(*slots):
    return Rows(list(slots), [len(OUTPUTS[slot]) for slot in slots], History())


def logits(num_rows):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(3))


def apply(processor, *slots):
    return processor.apply(logits(len(slots)), rows(*slots))


def test_each_row_goes_through_what_was_made_of_its_own_parameters():
    def make(params):
        return lambda output_ids, row: row - params.penalty * len(output_ids)

    processor = built(make)
    for slot in range(3):
        assert processor.admit(slot, Params(penalty=slot + 1.0), None)
    expected = logits(2) - torch.tensor([[9.0], [2.0]])
    torch.testing.assert_close(apply(processor, 2, 0), expected)


def test_three_parameters_get_the_prompt_too():
    seen = []
    processor = built(lambda params: lambda prompt_ids, output_ids, row: seen.append((prompt_ids, output_ids)) or row)
    processor.admit(0, Params(), None)
    apply(processor, 0)
    assert seen == [([1, 2, 3], [1, 2])]


def test_a_row_may_be_changed_in_place():
    processor = built(lambda params: lambda output_ids, row: row.fill_(1.0))
    processor.admit(1, Params(), None)
    assert apply(processor, 1).tolist() == [[1.0] * VOCAB]


def test_a_request_that_it_is_not_made_for_leaves_nothing_of_the_slots_last_owner():
    processor = built(lambda params: None if params.penalty == 1 else lambda ids, row: row)
    assert processor.admit(0, Params(penalty=2.0), None)
    assert not processor.admit(0, Params(), None)
    with pytest.raises(KeyError):
        apply(processor, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RepetitionPenaltyLogitsProcessor(1.5),
        lambda: NoRepeatNGramLogitsProcessor(2),
        lambda: MinPLogitsWarper(0.1),
        lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0), MinPLogitsWarper(0.2)]),
    ],
    ids=["repetition", "no-repeat-ngram", "min-p", "list"],
)
def test_a_processor_of_transformers_gives_what_it_gives_there(make):
    processor = built(lambda params: make(), style="transformers")
    for slot in range(3):
        processor.admit(slot, Params(), None)
    found = apply(processor, 2, 0, 1)
    for row, slot in enumerate((2, 0, 1)):
        input_ids = torch.tensor([[*PROMPTS[slot], *OUTPUTS[slot]]])
        torch.testing.assert_close(found[row : row + 1], make()(input_ids, logits(3)[row : row + 1].clone()))


@pytest.mark.parametrize(
    ("style", "result", "found"),
    [
        ("vllm", None, "NoneType"),
        ("vllm", torch.zeros(3), r"\[3\]"),
        ("transformers", torch.zeros(2, VOCAB), r"\[2, 12\]"),
    ],
)
def test_something_else_than_a_row_is_an_error(style, result, found):
    processor = built(lambda params: lambda ids, row: result, style=style)
    processor.admit(0, Params(), None)
    with pytest.raises(ValueError, match=rf"a row \[12\] must come back for a row, found {found}"):
        apply(processor, 0)


def test_a_style_that_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match="style must be one of vllm, transformers, got 'sglang'"):
        per_request(lambda params: None, phase="mask", style="sglang")
