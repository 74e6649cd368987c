"""Configs that cannot be, or that say what is not built: refused by name, never misread."""

from pathlib import Path

import pytest

from headrace.core.opened import open_model
from headrace.hooks.errors import ModelError
from headrace.hooks.protocols import Artifact
from headrace.hooks.settings import Model, Settings
from tests.model.tiny import quiet
from tests.model.tiny_families import FAMILIES, SIZES, architecture, make, write

HF = {key: value for key, value in SIZES.items() if isinstance(value, int)}
GGUF = {
    "embedding_length": 48,
    "feed_forward_length": 56,
    "block_count": 2,
    "attention.head_count": 6,
    "context_length": 128,
    "vocab_size": 10,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


class Written:
    """A checkpoint that is nothing but metadata and shapes."""

    def __init__(self, name, metadata, shapes=()):
        self.generation = {}
        self.artifact = Artifact(kind="safetensors", path=Path("model"), name="model")
        self.architecture = name
        self.metadata = metadata
        self.shapes = dict.fromkeys(map(str, range(9)), (1,)) | dict(shapes)


def hf(name, change):
    family = FAMILIES[name]
    reader = architecture(family)
    return reader.program(Written(reader.names[-1], HF | dict(family.changes) | change))


def scaled(kind, **parameters):
    return {"rope_scaling": {"rope_type": kind, **parameters}}


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama", scaled("mrope"), r"rope_scaling\.rope_type must be one of default, linear, llama3"),
        ("llama", scaled(["yarn"]), r"rope_scaling\.rope_type"),
        ("llama", scaled("linear"), r"rope_scaling\.factor must be a number above 0, found nothing"),
        ("llama", scaled("linear", factor="4"), r"rope_scaling\.factor"),
        ("llama", scaled("dynamic"), r"rope_scaling\.factor"),
        ("llama", scaled("yarn"), r"rope_scaling\.factor"),
        ("llama", scaled("llama3", factor=8.0, high_freq_factor=4.0), r"rope_scaling\.low_freq_factor"),
        (
            "llama",
            scaled("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0),
            r"rope_scaling\.high_freq_factor must be above",
        ),
        ("phi3", scaled("longrope", short_factor=[1.0]), r"rope_scaling\.short_factor must be a list of 4 numbers"),
        ("phi3", scaled("su", short_factor=[1.0, 1.0, 1.0, 0.0]), r"rope_scaling\.short_factor"),
        ("phi3", scaled("yarn", short_factor=[1.0] * 3), r"rope_scaling\.short_factor must be a list of 4"),
        (
            "phi3",
            scaled("longrope", short_factor=[1.0] * 4, original_max_position_embeddings=1),
            r"rope_scaling\.original_max_position_embeddings must be above 1",
        ),
        ("llama", scaled("yarn", factor=2.0) | {"rope_theta": 1.0}, "rope_theta must be above 1"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters must be an object"),
        ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor must be left out"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1e308}}, "partial_rotary_factor"),
        ("qwen2", {"hidden_act": "quick_gelu"}, "hidden_act must be one of silu, swish, gelu"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types must be a list of 2"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types must be a list of 2"),
        ("mistral", {"sliding_window": -3}, "sliding_window must be a whole number"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be False"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma3", {"query_pre_attn_scalar": "16"}, "query_pre_attn_scalar"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be a list of 5"),
        ("mixtral", {"num_experts_per_tok": 6}, "cannot select 6 of 5 experts"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts must be"),
        ("qwen3_moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers must be a list"),
        ("olmo2", {"num_hidden_layers": 1 << 40}, "number of layers"),
        ("olmo2", {"head_dim": 7}, "head_dim must be even"),
    ],
)
def test_a_config_is_refused_by_name(name, change, named):
    with pytest.raises(ModelError, match=named):
        hf(name, change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"n_head": 5}, "attend: query, key and value must be 45"),
        ({"activation_function": "relu"}, "activation_function must be one of"),
    ],
)
def test_a_gpt2_config_is_refused_by_name(change, named):
    config = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128}

    with pytest.raises(ModelError, match=named):
        architecture(FAMILIES["gpt2"]).program(Written("GPT2LMHeadModel", config | change))


@pytest.mark.parametrize(
    ("name", "change", "shapes", "named"),
    [
        ("qwen2", {"rope.scaling.type": "mrope"}, {}, r"qwen2\.rope\.scaling\.type must be one of"),
        ("qwen2", {"rope.scaling.type": "linear"}, {}, r"qwen2\.rope\.scaling\.factor"),
        ("qwen2", {"rope.scaling.type": "longrope"}, {}, r"qwen2\.rope\.scaling\.short_factor"),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
            {},
            r"qwen2\.rope\.scaling\.yarn_log_multiplier must be 0",
        ),
        ("qwen2", {"rope.dimension_count": 4}, {}, r"qwen2\.rope\.dimension_count must be left out"),
        ("phi3", {"rope.dimension_count": 16}, {}, r"phi3\.rope\.dimension_count"),
        ("qwen3", {}, {"rope_freqs.weight": (3,)}, r"the shape of rope_freqs\.weight must be \[4\], found \[3\]"),
        ("qwen3", {"attention.value_length": 16}, {}, r"qwen3\.attention\.value_length"),
        ("qwen3", {"attention.layer_norm_rms_epsilon": None}, {}, r"qwen3\.attention\.layer_norm_rms_epsilon"),
        ("olmo2", {"attention.sliding_window": 4096}, {}, r"olmo2\.attention\.sliding_window must be 0"),
        ("gemma2", {"attention.sliding_window_pattern": [True]}, {}, r"sliding_window_pattern must be a list of 2"),
        ("gemma2", {"attention.sliding_window_pattern": 0}, {}, r"sliding_window_pattern"),
        ("llama", {"expert_count": 5}, {}, r"llama\.expert_used_count"),
        ("qwen3_moe", {"expert_count": 5, "expert_used_count": 2}, {}, r"qwen3moe\.expert_feed_forward_length"),
    ],
)
def test_a_gguf_file_is_refused_by_name(name, change, shapes, named):
    family = FAMILIES[name]
    metadata = {f"{family.gguf}.{key}": value for key, value in (GGUF | change).items()}

    with pytest.raises(ModelError, match=named):
        architecture(family, "gguf").program(Written(family.gguf, metadata, shapes))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt2"])
def test_the_same_config_without_the_mistake_passes(name):
    assert hf(name, {}).num_heads == 6


def test_a_family_that_no_plugin_knows_is_answered_with_those_that_are_there(tmp_path):
    family = FAMILIES["qwen2"]
    path = write(family, make(family), "safetensors", tmp_path)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("Qwen2ForCausalLM", "OtherForCausalLM"))

    with pytest.raises(ModelError, match=r"'OtherForCausalLM'; there are GPT2LMHeadModel, .*, qwen3moe, smollm3;"):
        open_model(Settings(model=Model(uri=str(path))), quiet)


def test_a_checkpoint_is_read_by_its_own_keys_where_the_operator_names_the_family():
    """`model.architecture` picks a family for a name that no plugin knows."""
    metadata = {f"mymodel.{key}": value for key, value in GGUF.items()}

    assert architecture(FAMILIES["qwen2"]).program(Written("mymodel", metadata)).hidden_size == 48
