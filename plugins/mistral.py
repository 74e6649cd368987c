"""The family `mistral`: llama whose attention slides. Its GGUF files are called llama, and are read there."""

from __future__ import annotations

from typing import ClassVar

from ..core.model.config import Config, read_sizes
from ..core.model.decoder import Decoder
from ..core.model.names import HF_WORDS, Names
from ..core.model.rope import read_rotation
from ..hooks.program import Checkpoint, Program
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1


class Mistral:
    """Writes a Mistral Program.

    Source: Jiang et al. 2023, Mistral 7B, arXiv:2310.06825, section 2.
    """

    names: ClassVar[tuple[str, ...]] = ("MistralForCausalLM",)

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint)
        sizes = read_sizes(config)
        rotation = read_rotation(config, sizes)
        d = Decoder(sizes, Names(HF_WORDS), eps=config.eps(1e-6), rotations=[rotation])
        ffn_size, activation = config.whole("intermediate_size"), config.activation()
        window = config.window(absent=4096)
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            x = d.b.add(x, d.attention(d.norm(x, f"{at}.attention_norm"), at, rotation, window=window))
            x = d.b.add(x, d.feed_forward(d.norm(x, f"{at}.ffn_norm"), at, ffn_size, activation=activation))
        return d.finish(x)


def _build(context: Context, options: None) -> Mistral:
    return Mistral()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its name."""
    for name in Mistral.names:
        register(name, _build, doc="Mistral.")
