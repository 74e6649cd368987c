"""What the page on migrating shows is a plugin that works, whichever way it was written."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from headrace.hooks.protocols import Context, Rows, SamplingContext
from headrace.hooks.registry import Registry
from tests.docs.blocks import blocks

SOURCES = {block.path: block.text for block in blocks("plugins/migrating.md") if block.language == "python"}
OUTPUTS = {0: [3, 5, 3], 1: [5], 2: []}
VOCAB = 8


class History:
    def prompt(self, slot):
        return torch.tensor([1], dtype=torch.int64)

    def output(self, slot):
        return torch.tensor(OUTPUTS[slot], dtype=torch.int64)


def ruled_out(name: str, **fields: int) -> list[list[int]]:
    """The tokens that the processor of a block rules out, for each of three slots."""
    module = ModuleType(name)
    exec(SOURCES[name], vars(module))
    registry = Registry()
    registry.add(module, name)
    (component,) = registry.offered("logits_processor")
    processor = component.build(Context(sampling=SamplingContext(vocab_size=VOCAB, num_slots=3))).component
    assert component.params is not None
    assert not processor.admit(0, component.params(), None)
    assert all(processor.admit(slot, component.params(**fields), None) for slot in OUTPUTS)
    rows = Rows(list(OUTPUTS), [len(ids) for ids in OUTPUTS.values()], History())
    result = processor.apply(torch.zeros(len(OUTPUTS), VOCAB), rows)
    return [row.isinf().nonzero()[:, 0].tolist() for row in result]


@pytest.mark.parametrize("name", ["vllm_style.py", "batched.py"])
def test_the_same_processor_does_the_same_both_ways(name: str) -> None:
    assert ruled_out(name, token_id=3) == [[3], [], []]


def test_a_processor_of_transformers_runs() -> None:
    # In the first row 3 was followed by 5; the prompt's 1 by 3, by 5 and by nothing.
    assert ruled_out("transformers_style.py", size=2) == [[5], [], []]


def test_no_block_is_left_untested() -> None:
    assert set(SOURCES) == {"vllm_style.py", "transformers_style.py", "batched.py"}
