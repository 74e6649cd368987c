"""What the compiled kernels keep of keys and values, beside the float32 of a cache in torch."""

from __future__ import annotations

import pytest
import torch

from headrace.hooks.testing.attention import garbage
from headrace.plugins.llama import Llama
from headrace.plugins.native_attention import NativeAttention
from headrace.plugins.sdpa import Plan, Sdpa
from tests.model.tiny import batch
from tests.model.tiny_families import FAMILIES, make, write
from tests.native.compiled import DIALECTS, open_native, pytestmark, same_attention

__all__ = ["pytestmark"]
PROMPT = [(7 * i * i + 3 * i) % 99 for i in range(53)]
BLOCKS = [9, 4, 31, 2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    family = FAMILIES["llama"]
    return write(family, make(family, head_dim=32), "safetensors", tmp_path_factory.mktemp("llama"))


def cached(model, attention, layer):
    """Keys and values of the prompt, `[num_kv_heads, 53, head_dim]`."""
    span = Plan(batch((PROMPT, 0, BLOCKS))).spans[0]
    return tuple(x[:, 0] for x in attention.gather(model.store.layer(layer), span))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_kept_is_as_near_as_it_says(path, dialect):
    """Half a unit, and the last bits of the products before it.

    Of integers a key's norm is 32767 units, a value's largest 8191; bfloat16 has 8 bits of each number, and what was
    rounded in the first part of the prompt changes the second a little.
    """
    native = open_native(path, Llama(), dialect=dialect)
    exact = open_native(path, Llama(), attention=Sdpa())
    for model in (native, exact):
        for start, stop in ((0, 20), (20, 21), (21, 53)):
            model.forward(batch((PROMPT[start:stop], start, BLOCKS)))

    keys, values = cached(native, NativeAttention(dialect), 0)
    wanted_keys, wanted_values = cached(exact, Sdpa(), 0)

    if dialect == "amx":
        assert torch.equal(keys, wanted_keys.bfloat16().float())
        assert torch.equal(values, wanted_values.bfloat16().float())
        return
    unit = wanted_keys.norm(dim=-1, keepdim=True) / 32767
    assert ((keys - wanted_keys).abs() <= 0.51 * unit + 1e-6).all()
    unit = wanted_values.abs().amax(dim=-1, keepdim=True) / 8191
    assert ((values - wanted_values).abs() <= 0.51 * unit + 1e-6).all()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_step_writes_its_tokens_alone(path, dialect):
    model = open_native(path, Llama(), dialect=dialect)
    model.forward(batch((PROMPT[:21], 0, BLOCKS)))
    before = model.store.pool.clone()
    model.forward(batch((PROMPT[21:22], 21, BLOCKS)))

    changed = (model.store.pool != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [BLOCKS[1]]
    head_dim = model.program.head_dim
    per_head = (model.store.pool != before)[BLOCKS[1]].flatten(3).sum(-1)
    assert (per_head <= head_dim + NativeAttention.kv_extra).all()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e12])
def test_values_of_any_size_come_through(path, dialect, size):
    """All of a layer's values times *size*: float16 would have lost them."""
    model = open_native(path, Llama(), dialect=dialect)
    exact = open_native(path, Llama(), attention=same_attention(dialect))
    for each in (model, exact):
        layer = next(op.layer for op in each.program.ops if type(op).__name__ == "Attend")
        each.forward(batch((PROMPT[:52], 0, BLOCKS)))
        attention = NativeAttention(dialect) if each is model else Sdpa()
        keys, values = cached(each, attention, layer)
        plan = Plan(batch((PROMPT[:52], 0, BLOCKS)))
        attention.write(each.store.layer(layer), keys.transpose(0, 1)[:52], values.transpose(0, 1)[:52] * size, plan)

    found = model.forward(batch((PROMPT[52:], 52, BLOCKS)))
    wanted = exact.forward(batch((PROMPT[52:], 52, BLOCKS)))

    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-2 if dialect == "amx" else 2e-3)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_key_or_value_that_is_no_number_is_seen_in_the_logits(path, dialect, which):
    model = open_native(path, Llama(), dialect=dialect)
    model.forward(batch((PROMPT[:52], 0, BLOCKS)))
    layer = model.store.layer(0)
    layer[BLOCKS[0], which, :, -1, -2:] = garbage(torch.int16)  # The scale of slot 15.

    assert model.forward(batch((PROMPT[52:], 52, BLOCKS))).isnan().all()
