"""Every family on the compiled kernels, in every instruction set this machine speaks, against transformers."""

from __future__ import annotations

import msgspec
import pytest
import torch

from headrace.hooks.testing.attention import garbage
from headrace.plugins.sdpa import Sdpa
from tests.model.tiny import batch
from tests.model.tiny_families import FAMILIES, GPT2_SIZES, architecture, make, reference_logits, write
from tests.native.compiled import DIALECTS, KERNELS, open_native, pytestmark, same_attention

__all__ = ["pytestmark"]
PROMPT = [(7 * i * i + 3 * i) % 99 for i in range(70)]
# Keys, values and the weights of values are integers of 14 to 16 bits; logits here are of the order of 1 to 10. Experts
# are chosen by the largest of numbers that may lie close together.
TOLERANCE = 1e-2
WHOLE_HEADS = {"head_dim": 16}


def torch_alike(model):
    """How far apart torch's rows are in other company: its last bits, and what they turn of a cache of 8."""
    return 5e-3 if model.store.pool.element_size() == 1 else 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A family whose heads are whole vectors, its model by transformers, and a folder with it."""
    found = FAMILIES[request.param]
    changes = WHOLE_HEADS
    if request.param == "gpt2":
        changes = {"n_head": GPT2_SIZES["n_embd"] // 16}
    elif request.param == "phi3":  # Its heads divide the model's width.
        changes = {"hidden_size": 96, "head_dim": 16}
    reference = make(found, **changes)
    return found, reference, write(found, reference, "safetensors", tmp_path_factory.mktemp("family"))


def far(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_equal_those_of_transformers(family, dialect):
    kind, reference, path = family
    model = open_native(path, architecture(kind), kernels=dialect)

    logits = model.forward(batch((PROMPT, 0, range(1, 6))))

    assert far(logits, reference_logits(reference, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("kernels", KERNELS)
def test_attention_equals_torch_with_the_same_rounding(family, kernels):
    kind, _, path = family
    step = batch((PROMPT, 0, range(1, 6)))
    model = open_native(path, architecture(kind), kernels=kernels)
    wanted = open_native(path, architecture(kind), kernels=kernels, attention=same_attention(kernels))

    # Of 8 bits, one at the border of two integers may fall to either side.
    assert far(model.forward(step), wanted.forward(step)) < (0.05 if kernels.endswith(" 8") else TOLERANCE)


def test_with_a_cache_in_float32_they_are_as_close_as_the_reference(family):
    """A stranger's attention ends the compiled segments, and keeps its own cache."""
    kind, reference, path = family
    model = open_native(path, architecture(kind), attention=Sdpa())

    logits = model.forward(batch((PROMPT, 0, range(1, 6))))

    assert model.breaks["attend"] == model.program.num_layers
    assert far(logits, reference_logits(reference, PROMPT)) < 1e-4


def test_a_batch_equals_each_alone_to_the_bit(family):
    """A decode past the window, a chunk, and a fresh prompt, in one step. Mixtures of experts are torch's affair."""
    kind, _, path = family
    tables = [3, 5, 7], [4, 8, 6], [11, 10]
    model = open_native(path, architecture(kind))
    model.forward(batch((PROMPT[:40], 0, tables[0]), (PROMPT[20:50], 0, tables[1])))
    steps = [(PROMPT[40:41], 40, tables[0]), (PROMPT[50:58], 30, tables[1]), (PROMPT[5:30], 0, tables[2])]

    together = model.forward(batch(*steps)).clone()
    alone = torch.cat([model.forward(batch(step)).clone() for step in steps])

    if model.breaks:
        assert far(together, alone) < torch_alike(model)
    else:
        assert torch.equal(together, alone)


def test_a_chunk_of_which_nothing_is_sampled_leaves_what_the_next_one_needs(family):
    """Mixtures of experts, which torch runs, are given no row then."""
    kind, _, path = family
    model = open_native(path, architecture(kind))
    whole = model.forward(batch((PROMPT, 0, range(1, 6))))[-1].clone()
    model.store.pool[1:] = garbage(model.store.pool.dtype)
    first = batch((PROMPT[:50], 0, range(1, 6)))

    none = model.forward(msgspec.structs.replace(first, sample_rows=first.sample_rows[:0]))
    last = model.forward(batch((PROMPT[50:], 50, range(1, 6))))[-1]

    assert len(none) == 0
    assert far(last, whole) < (torch_alike(model) if model.breaks else 1e-9)


def test_only_experts_end_a_segment(family):
    kind, _, path = family
    model = open_native(path, architecture(kind))

    assert set(model.breaks) <= {"moe"}


@pytest.mark.parametrize("members", [2, 5, 19])
def test_sequences_that_share_blocks_equal_each_alone_to_the_bit(family, members):
    """Nine blocks in common; beside them a sequence that shares five, and one that shares none."""
    kind, _, path = family
    model = open_native(path, architecture(kind), num_blocks=100)
    tokens = [(11 * i * i + 5 * i) % 99 for i in range(170)]
    common = list(range(1, 10))
    tables = [[*common, 20 + 2 * i, 21 + 2 * i] for i in range(members)]
    model.forward(batch((tokens[:144], 0, common)))
    decodes = []
    for i, table in enumerate(tables):
        length = 145 + i
        model.forward(batch((tokens[i : i + length - 144], 144, table)))
        decodes.append(([tokens[i]], length, table))
    for length, table in ((100, [*common[:5], 70, 71, 72]), (110, [73, 74, 75, 76, 77, 78, 79])):
        model.forward(batch((tokens[:length], 0, table)))
        decodes.append(([7], length, table))

    together = model.forward(batch(*decodes)).clone()
    alone = torch.cat([model.forward(batch(decode)).clone() for decode in decodes])

    assert torch.isfinite(together).all()
    if model.breaks:
        assert far(together, alone) < torch_alike(model)
    else:
        assert torch.equal(together, alone)
