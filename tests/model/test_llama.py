"""The family llama against transformers, on tiny random weights, through both file formats."""

import json
from pathlib import Path

import pytest
import torch

from headrace.core.model.load import weight_bytes
from headrace.hooks.errors import ModelError
from headrace.hooks.protocols import Artifact
from headrace.plugins.llama import Llama
from tests.model.tiny import batch, expected_logits, open_checkpoint, open_model, transformers_model, write_gguf

TOLERANCE = 1e-4
# Long enough for a wrong base of the rotation to show.
PROMPT = [(7 * i * i + 3 * i) % 99 for i in range(600)]
VARIANTS = {
    "heads wider than the model": {},
    "as many KV heads as heads": {"num_key_value_heads": 6},
    "one KV head": {"num_key_value_heads": 1},
    "narrow heads": {"head_dim": 4},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def write(model, kind: str, folder: Path) -> Path:
    if kind == "gguf":
        return write_gguf(model, folder / "tiny.gguf")
    model.save_pretrained(folder / "tiny")
    return folder / "tiny"


def logits(path: Path) -> torch.Tensor:
    return open_model(path).forward(batch((PROMPT, 0, range(1, 39))))


class Written:
    """A checkpoint that is nothing but metadata and shapes."""

    def __init__(self, architecture, metadata, shapes=()):
        self.generation = {}
        self.artifact = Artifact(kind="gguf", path=Path("model.gguf"), name="model")
        self.architecture = architecture
        self.metadata = metadata
        self.shapes = dict(shapes)


CONFIG = {
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 100,
}
GGUF = {
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 64,
    "llama.block_count": 1,
    "llama.attention.head_count": 4,
    "llama.context_length": 128,
    "llama.vocab_size": 10,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (10, 64)}


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, kind, tmp_path):
    reference = transformers_model(**VARIANTS[variant])

    found = logits(write(reference, kind, tmp_path))

    assert (found - expected_logits(reference, PROMPT)).abs().max() < TOLERANCE


def test_another_base_of_the_rotation_would_show():
    """Otherwise the test above could not see ML09."""
    one, other = (
        transformers_model(rope_parameters={"rope_type": "default", "rope_theta": theta}) for theta in (1e4, 1e5)
    )

    difference = (expected_logits(one, PROMPT) - expected_logits(other, PROMPT)).abs()[500:]

    assert difference.max() > 100 * TOLERANCE


@pytest.mark.parametrize("place", ["rope_theta", "rope_parameters", "nowhere"])
def test_the_base_is_read_from_old_and_new_configs(place, tmp_path):
    theta = 10000.0 if place == "nowhere" else 100000.0
    reference = transformers_model(rope_parameters={"rope_type": "default", "rope_theta": theta})
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": {"rope_theta": theta}, "rope_parameters": {"rope_parameters": {"rope_theta": theta}}}.get(
        place, {}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert (logits(tmp_path) - expected_logits(reference, PROMPT)).abs().max() < TOLERANCE


def test_a_tied_head_that_the_file_repeats_shares_storage_with_the_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    reference = transformers_model(tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")

    model = open_model(tmp_path)

    assert model.linears["head"].weight is model.tensors["embed"]
    assert (logits(tmp_path) - expected_logits(reference, PROMPT)).abs().max() < TOLERANCE


def test_a_head_that_differs_counts_in_spite_of_the_flag(tmp_path):
    """As with transformers, which takes the flag for a mistake of the config."""
    reference = transformers_model(tie_word_embeddings=False)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))

    assert (logits(tmp_path) - expected_logits(reference, PROMPT)).abs().max() < TOLERANCE


def test_the_width_of_heads_is_read_and_not_computed():
    program = Llama().program(Written("LlamaForCausalLM", CONFIG, {"model.embed_tokens.weight": (100, 2560)}))

    shapes = {weight.source: weight.shape for weight in program.weights.values()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4096, 2560)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (1024, 2560)
    assert shapes["model.layers.0.self_attn.v_proj.weight"] == (1024, 2560)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (2560, 4096)
    assert {op.scale for op in program.ops if hasattr(op, "scale")} == {128**-0.5}
    assert {len(op.frequencies) for op in program.ops if hasattr(op, "frequencies")} == {64}


def test_weights_are_counted_in_float32_and_a_tied_head_once(tiny_folder):
    reference = transformers_model()

    program = Llama().program(open_checkpoint(tiny_folder))

    assert weight_bytes(program) == 4 * sum(weight.numel() for weight in reference.parameters())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"head_dim": 127}, "head_dim"),
        ({"num_key_value_heads": 5}, "num_kv_heads"),
        ({"num_hidden_layers": 1 << 40}, "number of layers"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(change, named):
    checkpoint = Written("LlamaForCausalLM", CONFIG | change, {"model.embed_tokens.weight": (100, 2560)})

    with pytest.raises(ModelError, match=named):
        Llama().program(checkpoint)


@pytest.mark.parametrize(
    ("metadata", "shapes", "named"),
    [
        ({}, {"rope_freqs.weight": (7,)}, "rope_freqs.weight"),
        ({"llama.rope.scaling.type": "yarn"}, {}, "llama.rope.scaling.factor"),
        ({"llama.rope.scaling.factor": -4.0}, {}, "llama.rope.scaling.factor"),
        ({"llama.rope.scale_linear": -2.0}, {}, "llama.rope.scale_linear"),
        ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 8}, {}, "llama.attention.value_length"),
        ({"llama.expert_count": 8}, {}, "llama.expert_used_count"),
        ({"llama.attention.head_count_kv": [4, 2]}, {}, "llama.attention.head_count_kv"),
        ({"llama.attention.head_count": None}, {}, "llama.attention.head_count"),
        ({"llama.block_count": 1 << 31}, {}, "number of layers"),
    ],
)
def test_a_gguf_that_is_not_supported_is_refused_by_name(metadata, shapes, named):
    with pytest.raises(ModelError, match=named):
        Llama().program(Written("llama", GGUF | metadata, SHAPES | shapes))


def test_a_gguf_without_scaling_passes():
    metadata = GGUF | {"llama.rope.scaling.type": "none", "llama.rope.dimension_count": 16, "llama.expert_count": 0}

    assert Llama().program(Written("llama", metadata, SHAPES)).head_dim == 16
