"""Products of integers against the same arithmetic in torch, and the promise that bits do not depend on company."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from torch import nn

from headrace.core.kernels.native.abi import SMALL, Storage
from headrace.core.kernels.native.pack import dequantize, pack_floats
from headrace.core.kernels.native.pages import gather
from headrace.core.kernels.quantized import QuantizedLinear, quantize_q4, round_activations
from headrace.core.model.load import load
from headrace.hooks.testing.attention import garbage
from headrace.plugins.integers import Integers
from headrace.plugins.llama import Llama
from headrace.plugins.native_attention import NativeAttention
from headrace.plugins.qwen2 import Qwen2
from headrace.plugins.sdpa import Sdpa
from tests.model.tiny import batch, open_checkpoint, transformers_model
from tests.model.tiny_families import FAMILIES, make, write
from tests.native.compiled import KERNELS, native_attention, open_native, pytestmark, same_attention

__all__ = ["pytestmark"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PROMPT = [(5 * i * i + i) % 90 for i in range(75)]


@pytest.fixture(scope="module", params=[16, 32])
def path(tmp_path_factory, request):
    """A model whose heads are half a group of integers wide, or a whole one."""
    folder = tmp_path_factory.mktemp("integers")
    transformers_model(**{**SIZES, "head_dim": request.param}).save_pretrained(folder)
    return folder


def integers(bits):
    return Integers(bits, 8)


def rounded(x, bits):
    """*x* float32 with so many significant bits, halves away from 0."""
    unit = 1 << 24 - bits
    return ((x.view(torch.int32) + unit // 2) & -unit).view(torch.float32)


class Tiled(Integers):
    """What `amx` multiplies, in torch: activations in bfloat16, weights in 11 significant bits and of these 8."""

    def linear(self, name, weight, bias):
        weights = rounded(dequantize(super().linear(name, weight, bias).packed).half().float(), 8)
        return lambda x: nn.functional.linear(x.bfloat16().float(), weights, bias)


class Finer(Integers):
    """What others multiply beside a cache of 8 bits, in torch: a scale for each 16 into keys, values and logits."""

    def linear(self, name, weight, bias):
        made = super().linear(name, weight, bias)
        if name.rpartition(".")[2] not in ("q", "k", "v", "head"):
            return made
        return lambda x: nn.functional.linear(round_activations(x, 16), dequantize(made.packed))


def same_arithmetic(kernels, bits, *, alone=False):
    """alone: of products, whose attention keeps no integers."""
    if kernels.startswith("amx"):
        return Tiled(bits, 8)
    return Finer(bits, 8) if kernels.endswith(" 8") and not alone else integers(bits)


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_output_has_its_own_bias_and_each_row_its_own_residual(tmp_path, kernels):
    """With 32 tokens and with one; heads of 48 leave a block of outputs without a second.

    Most logits are the same but for the last bits. The others come of values at the border of two integers.
    """
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 48,
    }
    path = write(FAMILIES["qwen2"], make(FAMILIES["qwen2"], **sizes), "safetensors", tmp_path)
    checkpoint = open_checkpoint(path)
    quantizer = same_arithmetic(kernels, 8, alone=True)
    reference = load(checkpoint.artifact, checkpoint, Qwen2(), quantizer, Sdpa(), num_blocks=20, block_size=16)
    model = open_native(path, Qwen2(), quantizer=integers(8), attention=Sdpa(), kernels=kernels)

    for start, stop in ((0, 32), (32, 33), (33, 75)):
        step = batch((PROMPT[start:stop], start, range(1, 6)))
        assert float((model.forward(step) - reference.forward(step)).abs().median()) < 0.01


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_the_same_arithmetic_in_torch(path, bits, kernels):
    step = batch((PROMPT, 0, range(1, 6)))
    far = []
    for attention, same in ((Sdpa(), Sdpa()), (native_attention(kernels), same_attention(kernels))):
        checkpoint = open_checkpoint(path)
        quantizer = same_arithmetic(kernels, bits, alone=not isinstance(attention, NativeAttention))
        reference = load(checkpoint.artifact, checkpoint, Llama(), quantizer, same, num_blocks=20, block_size=16)
        model = open_native(path, Llama(), quantizer=integers(bits), attention=attention, kernels=kernels)
        far.append(float((model.forward(step) - reference.forward(step)).abs().mean()))

    # A value at the border of two integers may fall to either side: a step of 1/127 of its group's largest. With keys
    # and values in integers of 16 bits more of them do, for the reference has none.
    assert far[0] < 0.002
    assert far[1] < (0.02 if kernels.endswith(" 8") else 0.04)


@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("company", [1, 2, 3, 7, 32])
def test_bits_do_not_depend_on_company(path, bits, kernels, company):
    """Decodes beside 0 to 31 others, on blocks whose unused slots are NaN."""
    model = open_native(path, Llama(), quantizer=integers(bits), kernels=kernels, num_blocks=100)
    prompts = [[(i * 13 + j) % 90 for j in range(3 + i % 29)] for i in range(company)]
    tables = [[3 * i + 1, 3 * i + 2, 3 * i + 3] for i in range(company)]
    model.forward(batch(*((prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True))))
    decodes = [([7], len(prompt), table) for prompt, table in zip(prompts, tables, strict=True)]

    together = model.forward(batch(*decodes)).clone()
    alone = torch.cat([model.forward(batch(decode)).clone() for decode in decodes])

    assert torch.isfinite(together).all()
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("kernels", KERNELS[:2])
@pytest.mark.parametrize("cuts", [(1,), (16,), (31, 32, 33), (7, 14, 70), tuple(range(1, 75))])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(path, bits, kernels, cuts):
    model = open_native(path, Llama(), quantizer=integers(bits), kernels=kernels)
    whole = model.forward(batch((PROMPT, 0, range(1, 6)))).clone()
    model.store.pool[1:] = garbage(model.store.pool.dtype)
    bounds = [0, *cuts, len(PROMPT)]

    parts = [
        model.forward(batch((PROMPT[start:stop], start, [9, 4, 31, 2, 17]))).clone()
        for start, stop in itertools.pairwise(bounds)
    ]

    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [[74], [0], [3, 40, 41, 80], [79, 2, 2, 74]])
def test_rows_that_nobody_samples_change_nothing(path, bits, kernels, rows):
    """From the last attention on only sampled rows are computed."""
    model = open_native(path, Llama(), quantizer=integers(bits), kernels=kernels)
    step = batch((PROMPT, 0, range(1, 6)), (PROMPT[:7], 0, [6]))
    everything = model.forward(step).clone()

    some = model.forward(msgspec.structs.replace(step, sample_rows=torch.tensor(rows)))

    assert torch.equal(some, everything[rows])


@pytest.mark.parametrize("kernels", KERNELS)
def test_sequences_of_the_same_blocks_may_be_at_different_places(path, kernels):
    """Tables that name more blocks than a sequence has reached."""
    model = open_native(path, Llama(), quantizer=integers(4), kernels=kernels, num_blocks=40)
    tokens = [(11 * i * i + 5 * i) % 99 for i in range(200)]
    table = list(range(3, 16))
    model.forward(batch((tokens, 0, table)))
    rows = [([tokens[at]], at, table) for at in (199, 20, 130, 64, 63)]

    together = model.forward(batch(*rows)).clone()
    alone = torch.cat([model.forward(batch(row)).clone() for row in rows])

    assert torch.equal(together, alone)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_step_comes_to_its_end_while_a_thread_gives_way(path, num_threads):
    model = open_native(path, Llama(), quantizer=integers(4), num_threads=num_threads)
    step = batch((PROMPT, 0, range(1, 6)))
    expected = model.forward(step).clone()

    for wanted in (True, False, True):  # The last is how it is left to the destructor.
        model.give_way(wanted)
        assert torch.equal(model.forward(step), expected)


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("kernels", KERNELS)
def test_bits_do_not_depend_on_who_has_a_row(path, bits, num_threads, kernels):
    """Enough rows that threads divide them."""
    tokens = [(11 * i * i + 5 * i) % 90 for i in range(231)]
    table = range(1, 16)
    one = open_native(path, Llama(), quantizer=integers(bits), num_threads=1, kernels=kernels)
    rows = [one.forward(batch((tokens[i:j], i, table))).clone() for i, j in itertools.pairwise((0, 33, 34, 98, 231))]
    model = open_native(path, Llama(), quantizer=integers(bits), num_threads=num_threads, kernels=kernels)

    assert torch.equal(model.forward(batch((tokens, 0, table))), torch.cat(rows))


@pytest.mark.parametrize("num_threads", [1, 3, 4])
def test_bits_do_not_depend_on_threads(path, num_threads):
    step = batch((PROMPT, 0, range(1, 6)))
    logits = [open_native(path, Llama(), quantizer=integers(4), num_threads=n).forward(step) for n in (2, num_threads)]

    assert torch.equal(*logits)


class Changed(Integers):
    """Changes the packed matrices of one name."""

    def __init__(self, bits, ending, change):
        super().__init__(bits, bits)
        self._ending, self._change = ending, change

    def linear(self, name, weight, bias):
        made = super().linear(name, weight, bias)
        if name.endswith(self._ending):
            self._change(made.packed)
        return made


def scales_of(packed):
    """Scales, and offsets where there are some, as a view of the packed bytes."""
    if packed.storage is Storage.Q4:
        return packed.data.view(len(packed.data), -1, 320)[..., 256:]
    return packed.data.view(len(packed.data), -1, 1088)[..., :64]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("factor", [2.0**-4, 2.0**9])
def test_weights_of_any_size_give_the_same_digits(path, bits, kernels, factor):
    def change(packed):
        scales = scales_of(packed)
        scales.copy_((scales.contiguous().view(torch.float16) * factor).view(torch.uint8))

    step = batch((PROMPT, 0, range(1, 6)))
    usual = open_native(path, Llama(), quantizer=Integers(bits, bits), kernels=kernels).forward(step)
    changed = open_native(path, Llama(), quantizer=Changed(bits, "head", change), kernels=kernels).forward(step)

    assert torch.equal(changed, usual * factor)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("company", [1, 4])
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**-125])
def test_rows_so_small_that_nothing_makes_integers_of_them_stay_small(tmp_path, kernels, company, factor):
    logits = []
    for size in (1.0, factor):
        made = transformers_model(**SIZES)
        made.model.norm.weight.data *= size
        made.save_pretrained(tmp_path / str(size))
        model = open_native(tmp_path / str(size), Llama(), quantizer=integers(8), kernels=kernels)
        logits.append(model.forward(batch(*[(PROMPT[:20], 0, [2 * i + 1, 2 * i + 2]) for i in range(company)])) / size)

    if kernels.startswith("amx"):  # Has no integers; what its tiles make of such rows is 0 or right.
        assert logits[1].abs().max() < 1.1 * logits[0].abs().max()
        return
    small = logits[0] if factor >= SMALL else torch.zeros_like(logits[0])
    torch.testing.assert_close(logits[1], small, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_0_stays_0(path, bits, kernels):
    """Beside outputs of the same block that are not."""

    def change(packed):
        scales_of(packed).view(len(packed.data), -1, 2, 16, 2)[:, :, :, 5] = 0

    logits = open_native(path, Llama(), quantizer=Changed(bits, "head", change), kernels=kernels).forward(
        batch((PROMPT, 0, range(1, 6)))
    )

    assert (logits[:, 5::16] == 0).all()
    assert (logits[:, 6::16] != 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_is_not_a_number_is_seen_in_the_logits(path, bits, kernels):
    def change(packed):
        scales_of(packed)[0, 0] = 255  # Of a group of the first 16 outputs, NaN in float16.

    model = open_native(path, Llama(), quantizer=Changed(bits, ".q", change), kernels=kernels)

    assert not torch.isfinite(model.forward(batch((PROMPT, 0, range(1, 6))))).all()


class Doubled(nn.Module):
    """A stranger's product, which only torch can run."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2 / 2


class Strange(Integers):
    """Gives one kind of matrix back as something the library does not know."""

    def linear(self, name, weight, bias):
        made = super().linear(name, weight, bias)
        return Doubled(made) if name.endswith(".down") else made


def test_a_strangers_product_ends_a_segment_and_the_next_goes_on(path):
    step = batch((PROMPT, 0, range(1, 6)))
    model = open_native(path, Llama(), quantizer=Strange(8, 8))
    plain = open_native(path, Llama(), quantizer=integers(8))

    assert model.breaks == {"linear": model.program.num_layers}
    assert (model.forward(step) - plain.forward(step)).abs().mean() < 0.03


def test_matrices_lie_one_after_the_other_and_are_what_they_were():
    parts = [quantize_q4(torch.randn(48, 64)), torch.randn(7, 33), pack_floats(torch.randn(5, 40), torch.randn(5))]
    before = [part if isinstance(part, torch.Tensor) else dequantize(part) for part in parts]

    gather(parts)

    after = [part if isinstance(part, torch.Tensor) else dequantize(part) for part in parts]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    starts = [(part if isinstance(part, torch.Tensor) else part.data).data_ptr() for part in parts]
    assert all(start % 64 == 0 for start in starts)
    assert starts == sorted(starts)
    assert parts[2].bias is not None


def test_the_head_keeps_8_bits(path):
    checkpoint = open_checkpoint(path)
    linear = integers(4).linear("head", checkpoint.tensor("lm_head.weight"), None)

    assert isinstance(linear, QuantizedLinear)
    assert linear.packed.storage is Storage.Q8
