"""The family `llama`: Llama 1 to 3, SmolLM2 and all that share their shape, from GGUF or Hugging Face checkpoints.

Rotary scalings other than the default, experts and other activations are refused, never ignored.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from ..core.model.metadata import number, whole, wrong
from ..hooks.program import Builder, Checkpoint, Program, Value, rotary_frequencies
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1

GGUF_WORDS = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers": "blk",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
HF_WORDS = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Sizes(Struct, frozen=True, kw_only=True):
    """What the two kinds of metadata come to. *permuted*: rows of Q and K lie as GGUF has them."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    theta: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    ffn_bias: bool
    permuted: bool


class Llama:
    """Writes a llama Program.

    Source: Touvron et al. 2023, LLaMA, arXiv:2302.13971, section 2.2; grouped queries as in arXiv:2307.09288.
    """

    names: ClassVar[tuple[str, ...]] = ("llama", "LlamaForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*; reads metadata and shapes.

        Raises:
            ModelError: a size is missing or impossible, or the checkpoint uses what is not built yet.
        """
        from_gguf = checkpoint.architecture == "llama"
        sizes = _gguf_sizes(checkpoint) if from_gguf else _hf_sizes(checkpoint)
        words = GGUF_WORDS if from_gguf else HF_WORDS
        if sizes.num_layers > len(checkpoint.shapes):
            raise wrong(
                checkpoint, "the number of layers", f"at most {len(checkpoint.shapes)}, one a tensor", sizes.num_layers
            )

        def source(name: str) -> str:
            place = ".".join(words.get(part, part) for part in name.split("."))
            return place if name.endswith(".bias") else f"{place}.weight"

        b = Builder(
            source=source,
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            max_positions=sizes.max_positions,
        )
        frequencies = rotary_frequencies(sizes.theta, sizes.head_dim)
        x = b.embed()
        for i in range(sizes.num_layers):
            x = _layer(b, x, f"layers.{i}", sizes, frequencies)
        b.head(b.norm(x, "norm", eps=sizes.eps), "embed" if sizes.tied else "head")
        return b.build()


def _layer(b: Builder, x: Value, at: str, s: Sizes, frequencies: tuple[float, ...]) -> Value:
    query_width, kv_width = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    h = b.norm(x, f"{at}.attention_norm", eps=s.eps)
    q = b.linear(h, f"{at}.q", query_width, bias=s.qkv_bias, permuted_heads=s.num_heads if s.permuted else 0)
    k = b.linear(h, f"{at}.k", kv_width, bias=s.qkv_bias, permuted_heads=s.num_kv_heads if s.permuted else 0)
    v = b.linear(h, f"{at}.v", kv_width, bias=s.qkv_bias)
    a = b.attend(b.rotate(q, frequencies), b.rotate(k, frequencies), v)
    x = b.add(x, b.linear(a, f"{at}.o", s.hidden_size, bias=s.o_bias))
    h = b.norm(x, f"{at}.ffn_norm", eps=s.eps)
    gate = b.linear(h, f"{at}.gate", s.ffn_size, bias=s.ffn_bias)
    up = b.linear(h, f"{at}.up", s.ffn_size, bias=s.ffn_bias)
    return b.add(x, b.linear(b.gated(gate, up), f"{at}.down", s.hidden_size, bias=s.ffn_bias))


def _gguf_sizes(checkpoint: Checkpoint) -> Sizes:
    shapes = checkpoint.shapes
    hidden_size = whole(checkpoint, "llama.embedding_length")
    num_heads = whole(checkpoint, "llama.attention.head_count")
    head_dim = whole(checkpoint, "llama.attention.key_length", hidden_size // num_heads)
    _expect(checkpoint, "llama.attention.value_length", head_dim)
    _expect(checkpoint, "llama.rope.dimension_count", head_dim)
    _expect(checkpoint, "llama.expert_count", 0)
    _expect(checkpoint, "llama.rope.scaling.type", "none")
    # Without a type, a factor means linear scaling.
    _expect(checkpoint, "llama.rope.scaling.factor", 1.0)
    _expect(checkpoint, "llama.rope.scale_linear", 1.0)
    if "rope_freqs.weight" in shapes:
        raise wrong(checkpoint, "rope_freqs.weight", "absent: scaled rotation is not supported yet", "a tensor")
    embed = shapes.get("token_embd.weight", ())
    return Sizes(
        num_layers=whole(checkpoint, "llama.block_count"),
        hidden_size=hidden_size,
        ffn_size=whole(checkpoint, "llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=whole(checkpoint, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embed[0] if embed else whole(checkpoint, "llama.vocab_size"),
        max_positions=whole(checkpoint, "llama.context_length"),
        eps=number(checkpoint.metadata, "llama.attention.layer_norm_rms_epsilon", checkpoint),
        theta=number(checkpoint.metadata, "llama.rope.freq_base", checkpoint, 10000.0),
        tied="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        ffn_bias="blk.0.ffn_gate.bias" in shapes,
        permuted=True,
    )


def _hf_sizes(checkpoint: Checkpoint) -> Sizes:
    config = checkpoint.metadata
    hidden_size = whole(checkpoint, "hidden_size")
    num_heads = whole(checkpoint, "num_attention_heads")
    _expect(checkpoint, "hidden_act", "silu")
    attention_bias = config.get("attention_bias") is True
    return Sizes(
        num_layers=whole(checkpoint, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=whole(checkpoint, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=whole(checkpoint, "num_key_value_heads", num_heads),
        head_dim=whole(checkpoint, "head_dim", hidden_size // num_heads),
        vocab_size=whole(checkpoint, "vocab_size"),
        max_positions=whole(checkpoint, "max_position_embeddings", 2048),
        eps=number(config, "rms_norm_eps", checkpoint, 1e-6),
        theta=_hf_theta(checkpoint),
        # A head in the file counts in spite of the flag, as with transformers; mostly it repeats the embedding.
        tied=config.get("tie_word_embeddings") is True and "lm_head.weight" not in checkpoint.shapes,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        ffn_bias=config.get("mlp_bias") is True,
        permuted=False,
    )


def _hf_theta(checkpoint: Checkpoint) -> float:
    """`rope_parameters` of newer configs holds the base too; older ones have `rope_theta` and `rope_scaling`."""
    config = checkpoint.metadata
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope: Any = config.get(key) or {}
    if not isinstance(rope, dict):
        raise wrong(checkpoint, key, "an object", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise wrong(checkpoint, f"{key}.rope_type", "default: scaled rotation is not supported yet", kind)
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1):
        raise wrong(checkpoint, "partial_rotary_factor", "1: rotating a part of a head is not supported yet", fraction)
    return number(rope if rope.get("rope_theta") is not None else config, "rope_theta", checkpoint, 10000.0)


def _expect(checkpoint: Checkpoint, key: str, only: object) -> None:
    """Refuse any value of *key* but *only* and none."""
    found = checkpoint.metadata.get(key)
    if found is not None and found != only:
        raise wrong(checkpoint, key, f"{only} (nothing else is supported yet)", found)


def _build(context: Context, options: None) -> Llama:
    return Llama()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under both of its names."""
    for name in Llama.names:
        register(name, _build, doc="Llama, SmolLM2 and their like.")
