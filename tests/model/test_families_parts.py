"""What families needed of the Program: weights that are parts of tensors, and operations that llama has not."""

import pytest
import torch
from torch.nn import functional as F

from headrace.core.kernels.reference import ReferenceModel
from headrace.core.kv.store import KVStore
from headrace.core.model.load import check, load
from headrace.hooks.errors import ModelError
from headrace.hooks.program import Builder, ShapeError, Source
from headrace.hooks.protocols import Artifact
from headrace.plugins.sdpa import Sdpa
from headrace.plugins.unquantized import Unquantized
from tests.model.tiny import batch
from tests.model.tiny_families import FAMILIES, architecture, make, open_checkpoint, write

SIZES = {"num_layers": 1, "hidden_size": 4, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 12}


def builder(source=str):
    return Builder(source=source, max_positions=16, **SIZES)


def run(write):
    """Logits of six tokens through what *write* adds to an embedding, over an identity head; and the weights."""
    b = builder()
    x = b.embed()
    attended = b.attend(*(b.linear(x, name, 4) for name in "qkv"))
    write(b, b.add(x, b.scale(attended, 0.0)))
    program = b.build()
    torch.manual_seed(3)
    weights = {name: torch.randn(weight.shape) for name, weight in program.weights.items()}
    linears = {name: Unquantized().linear(name, weights[name], None) for name in program.matrices}
    store = KVStore(num_blocks=2, num_layers=1, num_kv_heads=1, block_size=16, head_dim=4)
    model = ReferenceModel(program, {name: weights[name] for name in program.plain}, linears, store, Sdpa())
    return model.forward(batch((list(range(6)), 0, [1]))), weights


class Counted:
    """An opened checkpoint that counts how often each tensor is read."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.reads = []

    def __getattr__(self, name):
        return getattr(self.checkpoint, name)

    def tensor(self, name):
        self.reads.append(name)
        return self.checkpoint.tensor(name)


def test_a_norm_around_the_mean_is_that_of_torch():
    logits, weights = run(lambda b, x: b.head(b.layer_norm(x, "norm", eps=1e-3)))

    normed = F.layer_norm(weights["embed"][:6], (4,), weights["norm"], weights["norm.bias"], 1e-3)
    assert torch.allclose(logits, normed @ weights["head"].T, atol=1e-5)


def test_positions_are_looked_up():
    logits, weights = run(lambda b, x: b.head(b.add(x, b.position())))

    assert torch.allclose(logits, (weights["embed"][:6] + weights["position"][:6]) @ weights["head"].T, atol=1e-5)


@pytest.mark.parametrize(("name", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_an_activation_may_stand_alone(name, approximate):
    logits, weights = run(lambda b, x: b.head(b.activate(x, name)))

    assert torch.allclose(logits, F.gelu(weights["embed"][:6], approximate=approximate) @ weights["head"].T, atol=1e-5)


def test_a_magnitude_multiplies_only_what_turns():
    logits, weights = run(lambda b, x: b.head(b.rotate(x, (0.0,), magnitude=3.0)))

    expected = weights["embed"][:6] * torch.tensor([3.0, 3.0, 1.0, 1.0])
    assert torch.allclose(logits, expected @ weights["head"].T, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        (Source(tensor="t"), (6, 4)),
        (Source(tensor="t", rows=(2, 20)), (20, 4)),
        (Source(tensor="t", transposed=True), (4, 6)),
        (Source(tensor="t", transposed=True, rows=(2, 20)), (4, 20)),
        (Source(tensor="t", stack=(1, 5)), (5, 6, 4)),
    ],
)
def test_the_tensor_of_the_file_has_the_shape_that_the_source_tells(source, stored):
    b = builder(lambda name: source if name == "w" else name)
    h = b.linear(b.embed(), "w", 6)
    b.head(b.attend(*(b.linear(h, name, 4) for name in "qkv")))

    weight = b.build().weights["w"]
    assert (weight.shape, weight.stored_shape) == ((6, 4), stored)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source(tensor="t", rows=(15, 20)), "w: 6 rows from row 15 exceed the 20 fused"),
        (Source(tensor="t", rows=(-1, 20)), "w: 6 rows from row -1"),
        (Source(tensor="t", stack=(5, 5)), "no number 5 in a stack of 5"),
    ],
)
def test_parts_that_a_tensor_cannot_have_are_refused(source, message):
    b = builder(lambda name: source if name == "w" else name)

    with pytest.raises(ShapeError, match=message):
        b.linear(b.embed(), "w", 6)


def test_a_fused_tensor_of_another_height_is_named(tmp_path):
    family = FAMILIES["phi3"]
    checkpoint = open_checkpoint(write(family, make(family), "safetensors", tmp_path))
    program = architecture(family).program(checkpoint)
    checkpoint.shapes = {**checkpoint.shapes, "model.layers.1.mlp.gate_up_proj.weight": (113, 48)}

    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.gate_up_proj\.weight must be \[112, 48\], found \[113, 48\]"
    ):
        check(program, checkpoint)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_moe", "gguf"), ("mixtral", "gguf"), ("phi3", "safetensors"), ("gpt2", "safetensors")]
)
def test_a_tensor_with_many_matrices_is_read_once(name, kind, tmp_path):
    family = FAMILIES[name]
    path = write(family, make(family), kind, tmp_path)
    checkpoint = Counted(open_checkpoint(path))
    artifact = Artifact(kind=kind, path=path, name="tiny")

    load(artifact, checkpoint, architecture(family, kind), Unquantized(), Sdpa(), num_blocks=2, block_size=16)

    matrices = [tensor for tensor in checkpoint.reads if len(checkpoint.shapes[tensor]) > 1]
    assert len(matrices) == len(set(matrices))
    assert set(checkpoint.reads) == set(checkpoint.shapes)
