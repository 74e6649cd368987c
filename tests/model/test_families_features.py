"""What a family may have besides its usual shape, each against transformers."""

import json
from functools import cache

import pytest
import torch

from headrace.hooks.program import Attend, Rotate
from tests.model.tiny import batch
from tests.model.tiny_families import FAMILIES, architecture, make, open_model, program_of, reference_logits, write

TOLERANCE = 1e-4
# Several times the original context of the scaled rotations below.
PROMPT = [(7 * i * i + 3 * i) % 99 for i in range(300)]
TABLE = range(1, 20)


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LISTED = ["full_attention", "sliding_attention"]
VARIANTS = {
    "linear": ("llama", rope("linear", factor=4.0)),
    "llama3": ("llama", rope("llama3", **LLAMA3)),
    "yarn": ("llama", rope("yarn", **YARN)),
    "yarn with another attention factor": ("qwen2", rope("yarn", **YARN, attention_factor=1.5)),
    "yarn with magnitudes": ("qwen3", rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2)),
    "yarn with another ramp": ("mistral", rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0)),
    "yarn without whole pairs": ("llama", rope("yarn", **YARN, truncate=False)),
    "dynamic": ("llama", rope("dynamic", factor=4.0)),
    "linear in olmo2": ("olmo2", rope("linear", factor=4.0)),
    "llama with an exact gelu": ("llama", {"hidden_act": "gelu"}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral tied": ("mistral", {"tie_word_embeddings": True}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding in upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen3 sliding where listed": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": LISTED},
    ),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 scaled by another width": ("gemma2", {"query_pre_attn_scalar": 5}),
    "gemma2 sliding where listed": ("gemma2", {"layer_types": LISTED}),
    "gemma2 biases and a head": ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3 with a cap": ("gemma3", {"final_logit_softcapping": 3.0}),
    "gemma3 scaled": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "phi3 turning a part": ("phi3", rope("default", partial_rotary_factor=0.75)),
    "phi3 with a window": ("phi3", {"sliding_window": 20}),
    "phi3 tied, one KV head": ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "smollm3 turning where listed": (
        "smollm3",
        {"no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 20},
    ),
    "smollm3 another interval, biases": (
        "smollm3",
        {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "mixtral with a window": ("mixtral", {"sliding_window": 20}),
    "mixtral with one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen3_moe without renormalizing": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe sparse in every other layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe dense where listed": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe sliding": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
}
GPT2_VARIANTS = {
    "another width": {"n_inner": 60},
    "exact gelu": {"activation_function": "gelu"},
    "scores scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "scores not scaled": {"scale_attn_weights": False},
    "a head": {"tie_word_embeddings": False},
}
GGUF_VARIANTS = {
    "linear": (
        "llama",
        rope("linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "linear without a type": ("qwen2", rope("linear", factor=4.0), {"rope.scaling.factor": 4.0}),
    "linear as it once was": ("llama", rope("linear", factor=4.0), {"rope.scale_linear": 4.0}),
    "a factor that counts for nothing": ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn": (
        "qwen3",
        rope("yarn", **YARN),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64},
    ),
    "yarn, all numbers": (
        "mistral",
        rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=1.5),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_attn_factor": 1.5,
        },
    ),
    "phi3 turning a part": ("phi3", rope("default", partial_rotary_factor=0.75), {"rope.dimension_count": 6}),
    "gemma3 scaled": (
        "gemma3",
        VARIANTS["gemma3 scaled"][1],
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 1e3},
    ),
    "gemma2 sliding where listed": (
        "gemma2",
        {"layer_types": LISTED},
        {"attention.sliding_window_pattern": [False, True]},
    ),
    "gemma3 sliding by another period": (
        "gemma3",
        {"layer_types": (["sliding_attention", "full_attention"] * 4)[:7]},
        {"attention.sliding_window_pattern": 2},
    ),
    "gemma2 scaled by another width": ("gemma2", {"query_pre_attn_scalar": 4}, {"attention.scale": 0.5}),
    "mixtral with three experts a token": ("mixtral", {"num_experts_per_tok": 3}, {}),
}


def logits(path, reader, prompt=PROMPT):
    return open_model(path, reader).forward(batch((prompt, 0, TABLE)))


def far(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@cache
def usual(name):
    """Logits of the family without any change."""
    return reference_logits(make(FAMILIES[name]), PROMPT)


def rewrite(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, tmp_path):
    name, changes = VARIANTS[variant]
    family = FAMILIES[name]
    reference = make(family, **changes)

    found = logits(write(family, reference, "safetensors", tmp_path), architecture(family))

    assert far(found, reference_logits(reference, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dynamic"])
def test_each_feature_would_show(variant):
    """Otherwise the test above could pass without it. Within the context, which is all there is, dynamic is nothing."""
    name, changes = VARIANTS[variant]

    difference = far(reference_logits(make(FAMILIES[name], **changes), PROMPT), usual(name))

    assert difference > 20 * TOLERANCE


@pytest.mark.parametrize("variant", GPT2_VARIANTS)
def test_gpt2_equals_transformers(variant, tmp_path):
    family = FAMILIES["gpt2"]
    reference = make(family, **GPT2_VARIANTS[variant])

    found = logits(write(family, reference, "safetensors", tmp_path), architecture(family), PROMPT[:128])

    assert far(found, reference_logits(reference, PROMPT[:128])) < TOLERANCE


@pytest.mark.parametrize("variant", GGUF_VARIANTS)
def test_logits_through_gguf_equal_those_of_transformers(variant, tmp_path):
    name, changes, metadata = GGUF_VARIANTS[variant]
    family = FAMILIES[name]
    reference = make(family, **changes)

    found = logits(write(family, reference, "gguf", tmp_path, metadata), architecture(family, "gguf"))

    assert far(found, reference_logits(reference, PROMPT)) < TOLERANCE


def test_gguf_keeps_the_scaling_of_llama3_as_divisors(tmp_path):
    family = FAMILIES["llama"]
    plain, reference = (make(family, **rope(kind, **values)) for kind, values in (("default", {}), ("llama3", LLAMA3)))
    divisors = (plain.model.rotary_emb.inv_freq / reference.model.rotary_emb.inv_freq).tolist()

    path = write(family, reference, "gguf", tmp_path, {"rope_freqs.weight": divisors})

    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(8.0)
    assert far(logits(path, architecture(family)), reference_logits(reference, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_older_configs_have_the_scaling_apart_from_the_base(kind, tmp_path):
    family = FAMILIES["llama"]
    parameters = {"linear": {"factor": 4.0}, "llama3": LLAMA3, "yarn": YARN}[kind]
    reference = make(family, **rope(kind, **parameters))
    path = write(family, reference, "safetensors", tmp_path)

    def older(config):
        del config["rope_parameters"]
        config |= {"rope_theta": 10000.0, "rope_scaling": {"type": kind, **parameters}}

    rewrite(path, older)

    assert far(logits(path, architecture(family)), reference_logits(reference, PROMPT)) < TOLERANCE


def test_older_gemma3_configs_name_the_base_of_sliding_layers(tmp_path):
    family = FAMILIES["gemma3"]
    reference = make(family, **VARIANTS["gemma3 scaled"][1])
    path = write(family, reference, "safetensors", tmp_path)

    def older(config):
        del config["rope_parameters"], config["layer_types"]
        config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e3, "sliding_window_pattern": 6}
        config |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}

    rewrite(path, older)

    assert far(logits(path, architecture(family)), reference_logits(reference, PROMPT)) < TOLERANCE


def test_older_qwen3_moe_configs_count_experts_under_another_name(tmp_path):
    family = FAMILIES["qwen3_moe"]
    reference = make(family)
    path = write(family, reference, "safetensors", tmp_path)
    rewrite(path, lambda config: config.update(num_experts=config.pop("num_local_experts")))

    assert far(logits(path, architecture(family)), reference_logits(reference, PROMPT)) < TOLERANCE


def test_the_oldest_gpt2_files_name_tensors_without_a_prefix(tmp_path):
    from safetensors.torch import load_file, save_file

    family = FAMILIES["gpt2"]
    reference = make(family)
    path = write(family, reference, "safetensors", tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("transformer."): x for name, x in tensors.items()}, path / "model.safetensors")

    found = logits(path, architecture(family), PROMPT[:50])

    assert far(found, reference_logits(reference, PROMPT[:50])) < TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_of_experts_that_tie_the_same_are_taken_as_by_transformers(name, tmp_path):
    family = FAMILIES[name]
    reference = make(family)
    with torch.no_grad():
        for key, weight in reference.named_parameters():
            if key.endswith("mlp.gate.weight"):
                weight[1:] = 0.0  # Equal to the last bit, which equal rows of a product need not be.
    path = write(family, reference, "safetensors", tmp_path)
    model = open_model(path, architecture(family))

    together = model.forward(batch((PROMPT, 0, TABLE)))
    one_by_one = [model.forward(batch(([token_id], i, TABLE))) for i, token_id in enumerate(PROMPT[:20])]

    assert far(together, reference_logits(reference, PROMPT)) < TOLERANCE
    assert far(torch.cat(one_by_one), reference_logits(reference, PROMPT[:20])) < TOLERANCE


def test_dynamic_scaling_ends_where_it_would_begin(tmp_path):
    """Within the context transformers does not scale; beyond, keys in the cache would have to turn again."""
    family = FAMILIES["llama"]
    scaled, plain = make(family, **rope("dynamic", factor=4.0)), make(family)

    scaled_program, plain_program = (
        program_of(write(family, model, "safetensors", tmp_path / kind), architecture(family))
        for kind, model in (("scaled", scaled), ("plain", plain))
    )

    assert scaled_program == plain_program
    assert scaled_program.max_positions == 512


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_longrope_turns_as_for_short_sequences_and_ends_at_the_original_context(kind, tmp_path):
    family = FAMILIES["phi3"]
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0]}
    reference = make(
        family,
        original_max_position_embeddings=128,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )
    metadata = {
        "rope_factors_short.weight": factors["short_factor"],
        "rope_factors_long.weight": factors["long_factor"],
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": float(reference.model.rotary_emb.attention_scaling),
    }
    path = write(family, reference, kind, tmp_path, metadata)

    assert reference.model.rotary_emb.attention_scaling > 1.1
    assert program_of(path, architecture(family)).max_positions == 128
    assert far(logits(path, architecture(family), PROMPT[:128]), reference_logits(reference, PROMPT[:128])) < TOLERANCE


def test_llama3_frequencies_are_those_of_the_reference(tmp_path):
    """Case ML01."""
    family = FAMILIES["llama"]
    parameters = {**LLAMA3, "rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    reference = make(family, head_dim=8, max_position_embeddings=65536, rope_parameters=parameters)

    program = program_of(write(family, reference, "safetensors", tmp_path), architecture(family))

    (frequencies,) = {op.frequencies for op in program.ops if isinstance(op, Rotate)}
    assert frequencies == pytest.approx((1.0, 0.0376060309, 5.24846161e-4, 6.64786987e-6), rel=1e-6)


def test_windows_alternate_by_layer(tmp_path):
    family = FAMILIES["gemma3"]

    program = program_of(write(family, make(family), "safetensors", tmp_path), architecture(family))

    assert [op.window for op in program.ops if isinstance(op, Attend)] == [20] * 5 + [None, 20]


def test_some_layers_of_smollm3_do_not_turn(tmp_path):
    family = FAMILIES["smollm3"]

    program = program_of(write(family, make(family), "safetensors", tmp_path), architecture(family))

    assert sum(isinstance(op, Rotate) for op in program.ops) == 2 * 4
