"""The family `olmo2`: norms come after attention and feed-forward, and queries and keys are normed as a whole."""

from __future__ import annotations

from typing import ClassVar

from ..core.model.config import Config, read_sizes
from ..core.model.decoder import Decoder
from ..core.model.names import GGUF_WORDS, HF_WORDS, Names
from ..core.model.rope import read_rotation
from ..hooks.program import Checkpoint, Program
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1

WORDS = HF_WORDS | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


class Olmo2:
    """Writes an OLMo 2 Program.

    Source: OLMo Team 2024, 2 OLMo 2 Furious, arXiv:2501.00656, section 2.1.
    """

    names: ClassVar[tuple[str, ...]] = ("olmo2", "Olmo2ForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint)
        if config.from_gguf:
            # Converters file OLMo 3, which slides, under this name as well.
            config.expect("sliding_window", 0)
        sizes = read_sizes(config)
        rotation = read_rotation(config, sizes)
        d = Decoder(
            sizes,
            Names(GGUF_WORDS if config.from_gguf else WORDS),
            eps=config.eps(1e-5),
            rotations=[rotation],
        )
        ffn_size, activation = config.whole("intermediate_size"), config.activation()
        bias = config.flag("attention_bias")
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            attended = d.attention(x, at, rotation, bias=bias, o_bias=bias, normed="all")
            x = d.b.add(x, d.norm(attended, f"{at}.post_attention_norm"))
            fed = d.feed_forward(x, at, ffn_size, activation=activation)
            x = d.b.add(x, d.norm(fed, f"{at}.post_ffn_norm"))
        return d.finish(x)


def _build(context: Context, options: None) -> Olmo2:
    return Olmo2()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in Olmo2.names:
        register(name, _build, doc="OLMo 2.")
