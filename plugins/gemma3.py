"""The family `gemma3`: text models of Gemma 3. Five of six layers slide, with a rotation of their own."""

from __future__ import annotations

from typing import ClassVar

from ..core.model.config import Config, Sizes, read_sizes
from ..core.model.decoder import Decoder
from ..core.model.names import GGUF_WORDS, HF_WORDS, Names
from ..core.model.rope import Rotation, read_rotation
from ..hooks.program import Checkpoint, Program, rotary_frequencies
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1

WORDS = HF_WORDS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


class Gemma3:
    """Writes a Gemma 3 Program.

    Source: Gemma Team 2025, Gemma 3 Technical Report, arXiv:2503.19786, section 2.
    """

    names: ClassVar[tuple[str, ...]] = ("gemma3", "Gemma3ForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint)
        config.expect("use_bidirectional_attention", False)
        sizes = read_sizes(config, tied=True, head_dim=256)
        whole, sliding = read_rotation(config, sizes, theta=1e6, layer_type="full_attention"), _local(config, sizes)
        names = Names(GGUF_WORDS) if config.from_gguf else Names(WORDS, norm_plus=1.0)
        d = Decoder(sizes, names, eps=config.eps(1e-6), rotations=[whole, sliding])
        ffn_size, bias = config.whole("intermediate_size"), config.flag("attention_bias")
        activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
        windows = _windows(config, sizes.num_layers)
        scale, softcap = _scale(config, sizes), config.optional("attn_logit_softcapping")
        x = d.b.scale(d.b.embed(), sizes.hidden_size**0.5)
        for i in range(sizes.num_layers):
            at, h = f"layers.{i}", d.norm(x, f"layers.{i}.attention_norm")
            rotation, window = sliding if windows[i] else whole, windows[i]
            attended = d.attention(
                h, at, rotation, window=window, bias=bias, o_bias=bias, normed="heads", scale=scale, softcap=softcap
            )
            x = d.b.add(x, d.norm(attended, f"{at}.post_attention_norm"))
            fed = d.feed_forward(d.norm(x, f"{at}.ffn_norm"), at, ffn_size, activation=activation)
            x = d.b.add(x, d.norm(fed, f"{at}.post_ffn_norm"))
        return d.finish(x, softcap=config.optional("final_logit_softcapping"))


def _local(config: Config, sizes: Sizes) -> Rotation:
    """The rotation of sliding layers: never scaled in older configs and in GGUF."""
    nested = config.get("rope_parameters")
    if isinstance(nested, dict) and nested.get("sliding_attention"):
        return read_rotation(config, sizes, theta=10000.0, layer_type="sliding_attention")
    return Rotation(frequencies=rotary_frequencies(config.number("rope_local_base_freq", 10000.0), sizes.head_dim))


def _windows(config: Config, num_layers: int) -> list[int | None]:
    """The window of each layer. A GGUF file without one has none."""
    period = 6 if config.from_gguf else config.whole("sliding_window_pattern", 6)
    window = config.window(absent=None if config.from_gguf else 4096)
    return config.windows(num_layers, window, lambda i: (i + 1) % period != 0)


def _scale(config: Config, sizes: Sizes) -> float:
    """What scores are multiplied with. GGUF has no key for it: only the 27B, of 62 layers, is not by its head_dim."""
    if not config.from_gguf:
        return float(config.number("query_pre_attn_scalar", 256) ** -0.5)
    width = sizes.hidden_size / sizes.num_heads if sizes.num_layers == 62 else sizes.head_dim
    return config.number("attention_scale", width**-0.5)


def _build(context: Context, options: None) -> Gemma3:
    return Gemma3()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in Gemma3.names:
        register(name, _build, doc="Gemma 3, text.")
