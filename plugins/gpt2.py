"""The family `gpt2`: learned positions, norms around the mean, a plain feed-forward, biases everywhere."""

from __future__ import annotations

from typing import ClassVar

from ..core.model.config import Config, Sizes, read_sizes
from ..core.model.names import GGUF_WORDS, Names
from ..hooks.program import Builder, Checkpoint, Program
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1

KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
WORDS = {
    "embed": "wte",
    "position": "wpe",
    "norm": "ln_f",
    "layers": "h",
    "attention_norm": "ln_1",
    "q": "attn.c_attn",
    "k": "attn.c_attn",
    "v": "attn.c_attn",
    "o": "attn.c_proj",
    "ffn_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


class GPT2:
    """Writes a GPT-2 Program.

    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3.
    """

    names: ClassVar[tuple[str, ...]] = ("gpt2", "GPT2LMHeadModel")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint, KEYS)
        config.expect("add_cross_attention", False)
        sizes = read_sizes(config, tied=True)
        eps = config.number("layer_norm_epsilon", 1e-5)
        activation = config.activation("activation_function", "gelu_new")
        ffn_size = config.whole("intermediate_size", 4 * sizes.hidden_size)
        b = Builder(
            source=_names(config, sizes),
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            max_positions=sizes.max_positions,
        )
        x = b.add(b.embed(), b.position())
        for i in range(sizes.num_layers):
            at, h = f"layers.{i}", b.layer_norm(x, f"layers.{i}.attention_norm", eps=eps)
            q, k, v = (b.linear(h, f"{at}.{name}", sizes.hidden_size, bias=True) for name in "qkv")
            attended = b.attend(q, k, v, scale=_scale(config, sizes, i))
            x = b.add(x, b.linear(attended, f"{at}.o", sizes.hidden_size, bias=True))
            h = b.layer_norm(x, f"{at}.ffn_norm", eps=eps)
            h = b.activate(b.linear(h, f"{at}.up", ffn_size, bias=True), activation)
            x = b.add(x, b.linear(h, f"{at}.down", sizes.hidden_size, bias=True))
        b.head(b.layer_norm(x, "norm", eps=eps), "embed" if sizes.tied else "head")
        return b.build()


def _names(config: Config, sizes: Sizes) -> Names:
    """Q, K and V are fused; Hugging Face has all matrices transposed, and the oldest files no prefix."""
    fused = {word: (i * sizes.hidden_size, 3 * sizes.hidden_size) for i, word in enumerate("qkv")}
    if config.from_gguf:
        return Names(GGUF_WORDS | dict.fromkeys("qkv", "attn_qkv"), fused=fused)
    prefix = "" if config.has("wte.weight") else "transformer."
    first = ("embed", "position", "norm", "layers")
    words = WORDS | {word: prefix + WORDS[word] for word in first} | {"head": "lm_head"}
    return Names(words, fused=fused, transposed=("q", "k", "v", "o", "up", "down"))


def _scale(config: Config, sizes: Sizes, layer: int) -> float:
    """What the scores of *layer* are multiplied with."""
    scale = sizes.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.flag("scale_attn_by_inverse_layer_idx") else scale


def _build(context: Context, options: None) -> GPT2:
    return GPT2()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in GPT2.names:
        register(name, _build, doc="GPT-2.")
