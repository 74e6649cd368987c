"""The family `llama`: Llama 1 to 3, SmolLM2 and all that share their shape, from GGUF or Hugging Face checkpoints.

Converters to GGUF file Mistral and Mixtral under this name too, so a GGUF checkpoint may have a window or experts.
"""

from __future__ import annotations

from typing import ClassVar

from ..core.model.config import Config, read_sizes
from ..core.model.decoder import Decoder, read_experts
from ..core.model.names import GGUF_WORDS, HF_WORDS, Names
from ..core.model.rope import read_rotation
from ..hooks.program import Checkpoint, Program
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1


class Llama:
    """Writes a llama Program.

    Source: Touvron et al. 2023, LLaMA, arXiv:2302.13971, section 2.2; grouped queries as in arXiv:2307.09288.
    """

    names: ClassVar[tuple[str, ...]] = ("llama", "LlamaForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*; reads metadata, shapes, and the divisors of a scaled rotation.

        Raises:
            ModelError: a size is missing or impossible, or the checkpoint uses what is not built yet.
        """
        config = Config(checkpoint)
        sizes = read_sizes(config, max_positions=2048)
        rotation = read_rotation(config, sizes)
        num_experts = config.whole("num_experts", 0, least=0) if config.from_gguf else 0
        words = GGUF_WORDS if config.from_gguf else HF_WORDS
        names = Names(words, num_experts=num_experts)
        eps = config.eps(1e-6)
        d = Decoder(sizes, names, eps=eps, rotations=[rotation], permuted=config.from_gguf)
        activation, ffn_size, window = config.activation(), config.whole("intermediate_size"), _window(config)
        experts = read_experts(config, ffn_size, renormalize=True) if num_experts else None
        bias, o_bias, ffn_bias = _biases(config)
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            h = d.norm(x, f"{at}.attention_norm")
            x = d.b.add(x, d.attention(h, at, rotation, window=window, bias=bias, o_bias=o_bias))
            h = d.norm(x, f"{at}.ffn_norm")
            x = d.b.add(
                x,
                d.mixture(h, at, experts, activation=activation)
                if experts
                else d.feed_forward(h, at, ffn_size, activation=activation, bias=ffn_bias),
            )
        return d.finish(x)


def _window(config: Config) -> int | None:
    """Only Mistral's converter writes one; a `sliding_window` in a Hugging Face config of llama means nothing."""
    return config.window() if config.from_gguf else None


def _biases(config: Config) -> tuple[bool, bool, bool]:
    """Whether Q, K and V, the projection back, and the feed-forward have biases. GGUF has no key for it."""
    if config.from_gguf:
        first = [config.has(f"blk.0.{name}.bias") for name in ("attn_q", "attn_output", "ffn_gate")]
        return first[0], first[1], first[2]
    attention = config.flag("attention_bias")
    return attention, attention, config.flag("mlp_bias")


def _build(context: Context, options: None) -> Llama:
    return Llama()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under both of its names."""
    for name in Llama.names:
        register(name, _build, doc="Llama, SmolLM2 and their like.")
