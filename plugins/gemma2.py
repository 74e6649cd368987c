"""The family `gemma2`: a norm before and after each half of a layer, soft caps, every other layer slides."""

from __future__ import annotations

from typing import ClassVar

from ..core.model.config import Config, Sizes, read_sizes
from ..core.model.decoder import Decoder
from ..core.model.names import GGUF_WORDS, HF_WORDS, Names
from ..core.model.rope import read_rotation
from ..hooks.program import Checkpoint, Program
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1

WORDS = HF_WORDS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


class Gemma2:
    """Writes a Gemma 2 Program.

    Source: Gemma Team 2024, Gemma 2, arXiv:2408.00118, section 2.
    """

    names: ClassVar[tuple[str, ...]] = ("gemma2", "Gemma2ForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint)
        config.expect("use_bidirectional_attention", False)
        sizes = read_sizes(config, tied=True, head_dim=256)
        rotation = read_rotation(config, sizes)
        # GGUF keeps 1 + weight, as the norms multiply with it.
        names = Names(GGUF_WORDS) if config.from_gguf else Names(WORDS, norm_plus=1.0)
        d = Decoder(sizes, names, eps=config.eps(1e-6), rotations=[rotation])
        ffn_size, bias = config.whole("intermediate_size"), config.flag("attention_bias")
        activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
        windows = config.windows(sizes.num_layers, config.window(absent=4096), lambda i: i % 2 == 0)
        scale, softcap = _scale(config, sizes), config.optional("attn_logit_softcapping", absent=50.0)
        x = d.b.scale(d.b.embed(), sizes.hidden_size**0.5)
        for i in range(sizes.num_layers):
            at, h = f"layers.{i}", d.norm(x, f"layers.{i}.attention_norm")
            attended = d.attention(
                h, at, rotation, window=windows[i], bias=bias, o_bias=bias, scale=scale, softcap=softcap
            )
            x = d.b.add(x, d.norm(attended, f"{at}.post_attention_norm"))
            fed = d.feed_forward(d.norm(x, f"{at}.ffn_norm"), at, ffn_size, activation=activation)
            x = d.b.add(x, d.norm(fed, f"{at}.post_ffn_norm"))
        return d.finish(x, softcap=config.optional("final_logit_softcapping", absent=30.0))


def _scale(config: Config, sizes: Sizes) -> float:
    """What scores are multiplied with. GGUF has no key for it: only the 27B, of 46 layers, is not by its head_dim."""
    if not config.from_gguf:
        return float(config.number("query_pre_attn_scalar", 256) ** -0.5)
    width = sizes.hidden_size / sizes.num_heads if sizes.num_layers == 46 else sizes.head_dim
    return config.number("attention_scale", width**-0.5)


def _build(context: Context, options: None) -> Gemma2:
    return Gemma2()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in Gemma2.names:
        register(name, _build, doc="Gemma 2.")
