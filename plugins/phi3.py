"""The family `phi3`: Phi-3, 3.5 and 4. Llama with fused matrices; a part of each head may turn."""

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

GGUF_FUSED = GGUF_WORDS | dict.fromkeys("qkv", "attn_qkv") | {"gate": "ffn_up"}
HF_FUSED = HF_WORDS | dict.fromkeys("qkv", "self_attn.qkv_proj") | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")


class Phi3:
    """Writes a Phi-3 Program.

    Source: Abdin et al. 2024, Phi-3 Technical Report, arXiv:2404.14219, section 2.
    """

    names: ClassVar[tuple[str, ...]] = ("phi3", "Phi3ForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint)
        sizes = read_sizes(config)
        rotation = read_rotation(config, sizes, partial=True)
        ffn_size, activation, window = config.whole("intermediate_size"), config.activation(), config.window()
        d = Decoder(
            sizes,
            Names(GGUF_FUSED if config.from_gguf else HF_FUSED, fused=_rows(sizes, ffn_size)),
            eps=config.eps(1e-5),
            rotations=[rotation],
        )
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            x = d.b.add(x, d.attention(d.norm(x, f"{at}.attention_norm"), at, rotation, window=window))
            x = d.b.add(x, d.feed_forward(d.norm(x, f"{at}.ffn_norm"), at, ffn_size, activation=activation))
        return d.finish(x)


def _rows(sizes: Sizes, ffn_size: int) -> dict[str, tuple[int, int]]:
    """Where each matrix begins in the fused one, and how many rows that has."""
    query, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    rows = {word: (start, query + 2 * kv) for word, start in (("q", 0), ("k", query), ("v", query + kv))}
    return rows | {"gate": (0, 2 * ffn_size), "up": (ffn_size, 2 * ffn_size)}


def _build(context: Context, options: None) -> Phi3:
    return Phi3()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in Phi3.names:
        register(name, _build, doc="Phi 3 to 4.")
