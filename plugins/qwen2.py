"""The family `qwen2`: Qwen 2 and 2.5. Llama with biases on Q, K and V; the upper layers may slide."""

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


class Qwen2:
    """Writes a Qwen2 Program.

    Source: Yang et al. 2024, Qwen2 Technical Report, arXiv:2407.10671, section 2.2.
    """

    names: ClassVar[tuple[str, ...]] = ("qwen2", "Qwen2ForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint)
        sizes = read_sizes(config)
        rotation = read_rotation(config, sizes)
        names = Names(GGUF_WORDS if config.from_gguf else HF_WORDS)
        d = Decoder(sizes, names, eps=config.eps(1e-6), rotations=[rotation])
        ffn_size, activation = config.whole("intermediate_size"), config.activation()
        window = config.window(absent=4096) if config.flag("use_sliding_window") else None
        first = config.whole("max_window_layers", 28, least=0)
        windows = config.windows(sizes.num_layers, window, lambda i: i >= first)
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            h = d.norm(x, f"{at}.attention_norm")
            x = d.b.add(x, d.attention(h, at, rotation, window=windows[i], bias=True))
            x = d.b.add(x, d.feed_forward(d.norm(x, f"{at}.ffn_norm"), at, ffn_size, activation=activation))
        return d.finish(x)


def _build(context: Context, options: None) -> Qwen2:
    return Qwen2()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in Qwen2.names:
        register(name, _build, doc="Qwen 2 and 2.5.")
