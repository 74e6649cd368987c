"""The family `smollm3`: llama in which every fourth layer does not turn its heads."""

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


class SmolLM3:
    """Writes a SmolLM3 Program.

    Source: Bakouch et al. 2025, SmolLM3; layers without rotation as in Yang et al. 2025, arXiv:2501.18795.
    """

    names: ClassVar[tuple[str, ...]] = ("smollm3", "SmolLM3ForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint)
        sizes = read_sizes(config, tied=True)
        rotation = read_rotation(config, sizes, theta=2e6)
        names = Names(GGUF_WORDS if config.from_gguf else HF_WORDS)
        eps = config.eps(1e-6)
        d = Decoder(sizes, names, eps=eps, rotations=[rotation], permuted=config.from_gguf)
        ffn_size, activation = config.whole("intermediate_size"), config.activation()
        bias, ffn_bias = config.flag("attention_bias"), config.flag("mlp_bias")
        turns = _turns(config, sizes.num_layers)
        window = config.window() if config.flag("use_sliding_window") else None
        windows = config.windows(sizes.num_layers, window, lambda i: not turns[i])
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at, turned = f"layers.{i}", rotation if turns[i] else None
            h = d.norm(x, f"{at}.attention_norm")
            x = d.b.add(x, d.attention(h, at, turned, window=windows[i], bias=bias, o_bias=bias))
            h = d.norm(x, f"{at}.ffn_norm")
            x = d.b.add(x, d.feed_forward(h, at, ffn_size, activation=activation, bias=ffn_bias))
        return d.finish(x)


def _turns(config: Config, num_layers: int) -> list[bool]:
    """Which layers turn their heads: as listed (1: turns), or all but each fourth, which GGUF has no key for."""
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = config.whole("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not all(turns in (0, 1) for turns in listed):
        raise config.wrong("no_rope_layers", f"a list of {num_layers} zeros and ones")
    return [turns == 1 for turns in listed]


def _build(context: Context, options: None) -> SmolLM3:
    return SmolLM3()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in SmolLM3.names:
        register(name, _build, doc="SmolLM3.")
