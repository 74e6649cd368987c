import headrace_granite
import pytest
import torch

from headrace.core.kernels import Batch
from headrace.core.model.load import load
from headrace.plugins.safetensors import SafetensorsLoader
from headrace.plugins.sdpa import Sdpa
from headrace.plugins.sources import FileSource
from headrace.plugins.unquantized import Unquantized
from headrace.testing import ArchitectureContract

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}
LAYER = {
    "input_layernorm": (32,),
    "post_attention_layernorm": (32,),
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (40, 32),
    "mlp.up_proj": (40, 32),
    "mlp.down_proj": (32, 40),
}
SHAPES = {
    "model.embed_tokens.weight": (61, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (61, 32),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()},
}


class TestGranite(ArchitectureContract):
    plugin = headrace_granite
    config = SIZES
    optional = (
        "num_key_value_heads",
        "max_position_embeddings",
        *(name for name in SIZES if "multiplier" in name or "scaling" in name),
    )
    shapes = SHAPES


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_its_logits_are_those_of_transformers(changes, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.GraniteConfig(
        **SIZES, **changes, initializer_range=0.2, bos_token_id=None, eos_token_id=None, attn_implementation="eager"
    )
    theirs = transformers.GraniteForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.ndim == 1:  # Norms and biases start as ones and zeros.
                weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in name))
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    found = ours(tmp_path, ids)
    assert (found - expected).abs().max() <= 1e-4
    assert expected.std() > 0.1


def ours(folder, ids):
    """Logits of every token, by the model that Headrace loads from *folder*."""
    artifact = FileSource().resolve(str(folder), lambda what, done, total: None)
    checkpoint = SafetensorsLoader().open(artifact)
    family = headrace_granite.Granite()
    model = load(artifact, checkpoint, family, Unquantized(), Sdpa(), num_blocks=8, block_size=16)
    checkpoint.close()
    batch = Batch(
        token_ids=ids,
        positions=torch.arange(len(ids)),
        cu_tokens=[0, len(ids)],
        seq_lens=[len(ids)],
        block_tables=[torch.arange(1, 4)],
        block_size=16,
        sample_rows=torch.arange(len(ids)),
        num_decodes=0,
    )
    return model.forward(batch)
