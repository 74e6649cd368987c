"""Every family against transformers, on tiny random weights, through both file formats."""

import itertools

import pytest
import torch

from tests.model.tiny import batch
from tests.model.tiny_families import FAMILIES, architecture, make, open_model, reference_logits, write

TOLERANCE = 1e-4
# Longer than any window, and no whole number of blocks.
PROMPT = [(7 * i * i + 3 * i) % 99 for i in range(70)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A family, its model by transformers, and a folder with it."""
    family = FAMILIES[request.param]
    reference = make(family)
    return family, reference, write(family, reference, "safetensors", tmp_path_factory.mktemp("family"))


def far(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


def test_logits_equal_those_of_transformers(folder):
    family, reference, path = folder

    logits = open_model(path, architecture(family)).forward(batch((PROMPT, 0, range(1, 6))))

    assert far(logits, reference_logits(reference, PROMPT)) < TOLERANCE


def test_logits_through_gguf_equal_those_of_transformers(folder, tmp_path):
    family, reference, _ = folder
    path = write(family, reference, "gguf", tmp_path)

    logits = open_model(path, architecture(family, "gguf")).forward(batch((PROMPT, 0, range(1, 6))))

    assert far(logits, reference_logits(reference, PROMPT)) < TOLERANCE


def test_chunks_and_decodes_equal_the_whole(folder):
    """A prompt cut before, in and past the window, then one token at a time."""
    family, reference, path = folder
    model = open_model(path, architecture(family))
    bounds = [0, 7, 16, 41, *range(60, 71)]

    parts = [
        model.forward(batch((PROMPT[start:stop], start, [9, 4, 31, 2, 17])))
        for start, stop in itertools.pairwise(bounds)
    ]

    assert far(torch.cat(parts), reference_logits(reference, PROMPT)) < TOLERANCE


def test_a_batch_equals_each_alone(folder):
    """A decode past the window, a chunk, and a fresh prompt, in one step."""
    family, reference, path = folder
    model = open_model(path, architecture(family))
    model.forward(batch((PROMPT[:40], 0, [3, 5, 7]), (PROMPT[20:50], 0, [4, 8, 6])))

    logits = model.forward(
        batch((PROMPT[40:41], 40, [3, 5, 7]), (PROMPT[50:58], 30, [4, 8, 6]), (PROMPT[5:30], 0, [11, 10]))
    )

    alone = [
        reference_logits(reference, PROMPT[:41])[40:],
        reference_logits(reference, PROMPT[20:58])[30:],
        reference_logits(reference, PROMPT[5:30]),
    ]
    assert far(logits, torch.cat(alone)) < TOLERANCE


def test_each_name_of_each_family_is_registered():
    from headrace.hooks.registry import Registry

    registry = Registry.discover()

    known = {component.name for component in registry.offered("architecture")}
    assert {name for family in FAMILIES.values() for name in architecture(family).names} <= known
    assert {f"{family.gguf}" for family in FAMILIES.values()} <= known
