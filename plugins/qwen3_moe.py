"""The family `qwen3_moe`: Qwen3 with experts in some or all of its layers."""

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


class Qwen3Moe:
    """Writes a Qwen3-MoE Program.

    Source: Yang et al. 2025, Qwen3 Technical Report, arXiv:2505.09388, section 2.
    """

    names: ClassVar[tuple[str, ...]] = ("qwen3moe", "Qwen3MoeForCausalLM")

    def program(self, checkpoint: Checkpoint) -> Program:
        """The Program of *checkpoint*. Raises ModelError where it is not one of this family that can be run."""
        # Transformers 5 writes num_local_experts, as other families do; older configs have num_experts.
        renamed = "num_local_experts" in checkpoint.metadata
        config = Config(checkpoint, {"num_experts": "num_local_experts"} if renamed else None)
        sizes = read_sizes(config)
        rotation = read_rotation(config, sizes)
        width = config.whole("moe_intermediate_size", 768 if not config.from_gguf else None)
        # GGUF has no key for it, and llama.cpp always does.
        experts = read_experts(config, width, renormalize=config.flag("norm_topk_prob", config.from_gguf))
        names = Names(GGUF_WORDS if config.from_gguf else HF_WORDS, num_experts=experts.num_experts)
        d = Decoder(sizes, names, eps=config.eps(1e-6), rotations=[rotation])
        activation, bias = config.activation(), config.flag("attention_bias")
        window = config.window(absent=4096) if config.flag("use_sliding_window") else None
        dense = _dense_layers(config, sizes.num_layers)
        x = d.b.embed()
        for i in range(sizes.num_layers):
            at = f"layers.{i}"
            h = d.norm(x, f"{at}.attention_norm")
            x = d.b.add(x, d.attention(h, at, rotation, window=window, bias=bias, o_bias=bias, normed="heads"))
            h = d.norm(x, f"{at}.ffn_norm")
            if i in dense:
                x = d.b.add(x, d.feed_forward(h, at, config.whole("intermediate_size"), activation=activation))
            else:
                x = d.b.add(x, d.mixture(h, at, experts, activation=activation))
        return d.finish(x)


def _dense_layers(config: Config, num_layers: int) -> set[int]:
    """Layers without experts: those listed, and all but each *decoder_sparse_step*-th."""
    step, listed = config.whole("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise config.wrong("mlp_only_layers", "a list of layers")
    return {i for i in range(num_layers) if i in listed or (i + 1) % step}


def _build(context: Context, options: None) -> Qwen3Moe:
    return Qwen3Moe()


@plugin
def register_architecture(register: Register) -> None:
    """Offer the family under its names."""
    for name in Qwen3Moe.names:
        register(name, _build, doc="Qwen 3 with experts.")
