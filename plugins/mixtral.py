"""The family `mixtral`: Mistral with experts. Its GGUF files are called llama, and are read there."""

from __future__ import annotations

from typing import ClassVar

from ..core.model.config import Config, read_sizes
from ..core.model.decoder import Decoder, read_experts
from ..core.model.names import HF_WORDS, Names
from ..core.model.rope import read_rotation
from ..hooks.program import Checkpoint, Program
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1

WORDS = HF_WORDS | {
    "router": "block_sparse_moe.gate",
    "experts.gate": "block_sparse_moe.experts.{}.w1",
    "experts.up": "block_sparse_moe.experts.{}.w3",
    "experts.down": "block_sparse_moe.experts.{}.w2",
}


class Mixtral:
    """Writes a Mixtral Program.

    Source: Jiang et al. 2024, Mixtral of Experts, arXiv:2401.04088, section 2.
    """

    names: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        config = Config(checkpoint, {"num_experts": "num_local_experts"})
        sizes = read_sizes(config)
        rotation = read_rotation(config, sizes, theta=1e6)
        d = Decoder(sizes, Names(WORDS), eps=config.eps(1e-5), rotations=[rotation])
        experts = read_experts(config, config.whole("intermediate_size"), renormalize=True)
        activation, window = config.activation(), config.window()
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            x = d.b.add(x, d.attention(d.norm(x, f"{at}.attention_norm"), at, rotation, window=window))
            x = d.b.add(x, d.mixture(d.norm(x, f"{at}.ffn_norm"), at, experts, activation=activation))
        return d.finish(x)


def _build(context: Context, options: None) -> Mixtral:
    return Mixtral()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its name."""
    for name in Mixtral.names:
        register(name, _build, doc="Mixtral.")
