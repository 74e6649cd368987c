"""The family `GraniteForCausalLM`: IBM's Granite 3, a Llama with a factor in four places.

Source: transformers, `models/granite/modeling_granite.py`: what is embedded, what each half of a layer adds, the scores
of attention and the logits are each multiplied or divided by a number of the config.
"""

from __future__ import annotations

from typing import ClassVar

import headrace
from headrace.core.model.config import Config, read_sizes
from headrace.core.model.decoder import Decoder
from headrace.core.model.names import HF_WORDS, Names
from headrace.core.model.rope import read_rotation

headrace_api = 1


class Granite:
    """Writes a Granite Program from a Hugging Face checkpoint."""

    names: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM",)

    def program(self, checkpoint):
        config = Config(checkpoint)
        sizes = read_sizes(config, max_positions=2048)
        rotation = read_rotation(config, sizes)
        d = Decoder(sizes, Names(HF_WORDS), eps=config.eps(1e-6), rotations=[rotation])
        width, activation = config.whole("intermediate_size"), config.activation()
        bias, ffn_bias = config.flag("attention_bias"), config.flag("mlp_bias")
        scale, residual = config.number("attention_multiplier", 1.0), config.number("residual_multiplier", 1.0)
        x = d.b.scale(d.b.embed(), config.number("embedding_multiplier", 1.0))
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            h = d.norm(x, f"{at}.attention_norm")
            attended = d.attention(h, at, rotation, bias=bias, o_bias=bias, scale=scale)
            x = d.b.add(x, d.b.scale(attended, residual))
            h = d.norm(x, f"{at}.ffn_norm")
            fed = d.feed_forward(h, at, width, activation=activation, bias=ffn_bias)
            x = d.b.add(x, d.b.scale(fed, residual))
        logits = d.b.head(d.norm(x, "norm"), "embed" if sizes.tied else "head")
        d.b.scale(logits, 1 / config.number("logits_scaling", 1.0))
        return d.b.build()


@headrace.plugin
def register_architecture(register):
    for name in Granite.names:
        register(name, lambda context, options: Granite(), doc="IBM's Granite 3.")
