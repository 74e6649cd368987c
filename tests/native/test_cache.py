"""What the compiled kernels keep of keys and values, beside the float32 of a cache in torch."""

from __future__ import annotations

import pytest
import torch

from headrace.core import steps
from headrace.core.model.load import quiet
from headrace.core.opened import open_model
from headrace.core.restack import discover
from headrace.core.steptime import Limits
from headrace.hooks.decode import Use
from headrace.hooks.origins import no_origin
from headrace.hooks.program import Attend
from headrace.hooks.protocols import Context
from headrace.hooks.settings import Model, Settings
from headrace.hooks.testing.attention import garbage
from headrace.plugins.llama import Llama
from headrace.plugins.native_attention import BYTES_DIALECTS, NativeAttention, turned
from headrace.plugins.sdpa import Plan, Sdpa
from tests.model.tiny import batch, transformers_model
from tests.model.tiny_families import FAMILIES, make, write
from tests.native.compiled import KERNELS, native_attention, open_native, pytestmark, same_attention

__all__ = ["pytestmark"]
PROMPT = [(7 * i * i + 3 * i) % 99 for i in range(53)]
BLOCKS = [9, 4, 31, 2]


@pytest.fixture(scope="module", params=[32, 64, 128])
def path(tmp_path_factory, request):
    """A model whose heads are turned in two vectors, in four at once, and in two times four."""
    family = FAMILIES["llama"]
    return write(family, make(family, head_dim=request.param), "safetensors", tmp_path_factory.mktemp("llama"))


def cached(model, attention, layer):
    """Keys and values of the prompt, `[num_kv_heads, 53, head_dim]`."""
    span = Plan(batch((PROMPT, 0, BLOCKS))).spans[0]
    return tuple(x[:, 0] for x in attention.gather(model.store.layer(layer), span))


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_kept_is_as_near_as_it_says(path, kernels):
    """Half a unit, and the last bits of the products before it.

    Of 16 bits a key's norm is 32767 units, a value's largest 8191; of 8 the largest of either is 127, of keys that were
    turned.
    """
    native = open_native(path, Llama(), kernels=kernels)
    exact = open_native(path, Llama(), attention=Sdpa())
    for model in (native, exact):
        for start, stop in ((0, 20), (20, 21), (21, 53)):
            model.forward(batch((PROMPT[start:stop], start, BLOCKS)))

    keys, values = cached(native, native_attention(kernels), 0)
    wanted_keys, wanted_values = cached(exact, Sdpa(), 0)

    if kernels.endswith(" 8"):
        wanted_keys = turned(wanted_keys)
        units = [x.abs().amax(dim=-1, keepdim=True) / 127 for x in (wanted_keys, wanted_values)]
    else:
        units = [wanted_keys.norm(dim=-1, keepdim=True) / 32767, wanted_values.abs().amax(dim=-1, keepdim=True) / 8191]
    assert ((keys - wanted_keys).abs() <= 0.51 * units[0] + 1e-6).all()
    assert ((values - wanted_values).abs() <= 0.51 * units[1] + 1e-6).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_writes_its_tokens_alone(path, kernels):
    model = open_native(path, Llama(), kernels=kernels)
    model.forward(batch((PROMPT[:21], 0, BLOCKS)))
    before = model.store.pool.clone()
    model.forward(batch((PROMPT[21:22], 21, BLOCKS)))

    changed = (model.store.pool != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [BLOCKS[1]]
    head_dim = model.program.head_dim
    per_head = (model.store.pool != before)[BLOCKS[1]].flatten(3).sum(-1)
    assert (per_head <= head_dim + native_attention(kernels).kv_extra).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-12, 1e12])
def test_values_of_any_size_come_through(path, kernels, size):
    """All of a layer's values times *size*: float16 would have lost them."""
    model = open_native(path, Llama(), kernels=kernels)
    exact = open_native(path, Llama(), attention=same_attention(kernels), kernels=kernels)
    for each, attention in ((model, native_attention(kernels)), (exact, same_attention(kernels))):
        layer = next(op.layer for op in each.program.ops if type(op).__name__ == "Attend")
        each.forward(batch((PROMPT[:52], 0, BLOCKS)))
        keys, values = cached(each, attention, layer)
        if kernels.endswith(" 8"):
            keys = turned(keys)  # Back.
        plan = Plan(batch((PROMPT[:52], 0, BLOCKS)))
        attention.write(each.store.layer(layer), keys.transpose(0, 1)[:52], values.transpose(0, 1)[:52] * size, plan)

    found = model.forward(batch((PROMPT[52:], 52, BLOCKS)))
    wanted = exact.forward(batch((PROMPT[52:], 52, BLOCKS)))

    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05 if kernels.endswith(" 8") else 2e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_key_or_value_that_is_no_number_is_seen_in_the_logits(path, kernels, which):
    model = open_native(path, Llama(), kernels=kernels)
    model.forward(batch((PROMPT[:52], 0, BLOCKS)))
    layer = model.store.layer(0)
    kept = native_attention(kernels).kv_extra
    layer[BLOCKS[0], which, :, -1, -kept:] = garbage(layer.dtype)  # The scale of slot 15.

    assert model.forward(batch((PROMPT[52:], 52, BLOCKS))).isnan().all()


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 256])
def test_a_turn_is_a_hadamard_matrix_of_the_runs(head_dim):
    matrix = torch.ones(1, 1)
    while head_dim % (2 * len(matrix)) == 0:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    whole = torch.block_diag(*[matrix / len(matrix) ** 0.5] * (head_dim // len(matrix)))
    x = torch.randn(3, 2, head_dim)

    torch.testing.assert_close(turned(x), x @ whole)
    torch.testing.assert_close(turned(turned(x)), x)


def test_one_large_feature_leaves_the_others_their_8_bits():
    """As many keys have one: without a turn all others would be 0."""
    attention, plan = NativeAttention(bits=8), Plan(batch((PROMPT, 0, BLOCKS)))
    layer = torch.full((60, 2, 2, 16, 32 + attention.kv_extra), garbage(torch.int8), dtype=torch.int8)
    keys = torch.randn(len(PROMPT), 2, 32)
    keys[..., 3] = 300

    attention.write(layer, keys, keys, plan)
    found = turned(attention.gather(layer, plan.spans[0])[0][:, 0]).transpose(0, 1)

    others = [i for i in range(32) if i != 3]
    assert (found - keys)[..., others].abs().max() < 0.6
    assert (found - keys)[..., others].pow(2).mean() < 0.1


@pytest.mark.parametrize(
    ("kernels", "weight_bits", "asked", "bits"),
    [
        ("amx", 5.7, None, 8),
        ("amx", 8.5, None, 8),
        ("amx", 16.0, None, 16),
        ("amx", 32.0, None, 16),
        ("amx", None, None, 16),
        ("amx", 5.7, 16, 16),
        ("amx", 32.0, 8, 8),
        ("avx512", 5.7, None, 8),
        ("avx512", 16.0, None, 16),
        ("avx512", 5.7, 16, 16),
        ("avx2", 5.7, None, 16),
        ("portable", 5.7, None, 16),
        ("portable", 5.7, 8, 8),
        (None, 5.7, None, 16),
    ],
)
def test_8_bits_are_where_they_are_faster_and_weights_few_bits_unless_asked_for(kernels, weight_bits, asked, bits):
    use = Use(use="native", options={} if asked is None else {"bits": asked})
    context = Context(kernels=kernels, weight_bits=weight_bits)
    attention = discover(Settings(), no_origin).build("attention", use, context).component

    assert attention.bits == bits
    assert attention.kv_dtype == f"int{bits}"


def test_kernels_that_have_no_8_bits_say_so():
    reason = NativeAttention("avx2", bits=8).supports(
        head_dim=64, num_heads=9, num_kv_heads=3, window=None, softcap=None, device="cpu"
    )

    assert reason == "the kernels avx2 have no cache of 8 bits; set the option bits to 16"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("head_dim", [48, 64, 80, 144, 176, 256, 512])
def test_heads_of_any_width_equal_torch_with_the_same_rounding(tmp_path, head_dim, kernels):
    """Widths that are one tile, several, or parts of some; and a decode is the same alone and beside a prompt."""
    transformers_model(head_dim=head_dim).save_pretrained(tmp_path)
    model = open_native(tmp_path, Llama(), kernels=kernels)
    torchs = open_native(tmp_path, Llama(), kernels=kernels, attention=same_attention(kernels))
    prompt, decode, other = (PROMPT, 0, BLOCKS), ([5], 53, BLOCKS), (PROMPT[:23], 0, [11, 12])

    found = [model.forward(batch(step)).clone() for step in (prompt, decode)]
    wanted = [torchs.forward(batch(step)).clone() for step in (prompt, decode)]
    together = model.forward(batch(decode, other))

    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 if kernels.endswith(" 8") else 1e-2)
    assert torch.equal(together[:1], found[1])


@pytest.mark.parametrize(("quantizer", "weight_bits"), [("none", 32), ("int8", 8.5)])
def test_an_attention_is_told_what_the_quantizer_keeps_and_auto_goes_by_it(tmp_path, quantizer, weight_bits):
    transformers_model(hidden_size=96, intermediate_size=96).save_pretrained(tmp_path)
    settings = Settings(model=Model(uri=str(tmp_path), quantizer=Use(use=quantizer)))

    opened = open_model(settings, quiet)
    opened.checkpoint.close()

    assert opened.context.weight_bits == pytest.approx(weight_bits, rel=0.05)
    few = weight_bits < 16 and opened.context.kernels in BYTES_DIALECTS
    assert opened.attention.kv_dtype == ("int8" if few else "int16")


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_reads_no_less_than_what_is_kept(path, kernels):
    """A byte of each feature, or two, of keys and of values, in all layers; and the weights."""
    model = open_native(path, Llama(), kernels=kernels)
    slow = Limits(kernels=kernels, read_bytes_per_s=1000.0, products_per_s=1e30, weight_bytes=0)

    timed = steps._time(model, model.program, "decode", 1, 15, steps._decode(1, 15, 16, 60), 1, slow)

    layers = sum(isinstance(op, Attend) for op in model.program.ops)
    width = model.program.num_kv_heads * model.program.head_dim
    assert timed.limit_s == pytest.approx(16 * 2 * layers * width * (1 if kernels.endswith(" 8") else 2) / 1000)
