"""What checkpoints call the weights that families share.

A Program's names are words joined by dots, such as `layers.3.q.bias` and `layers.3.experts.5.gate`; a table gives the
checkpoint's word for each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...hooks.program import Source

GGUF_WORDS = {
    "embed": "token_embd",
    "position": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "layers": "blk",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_ffn_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}
HF_WORDS = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}


class Names:
    """Canonical name of a weight → where the checkpoint has it.

    Args:
        words: canonical word → the checkpoint's. Experts are found by number where their word has `{}` in it; without,
            they are stacked in one tensor.
        fused: canonical word → (first row, rows in all), where one tensor holds several matrices.
        transposed: canonical words of matrices that lie as `[in_features, out_features]`.
        norm_plus: added to the weights of norms.
        num_experts: how many are stacked.
    """

    def __init__(
        self,
        words: Mapping[str, str],
        *,
        fused: Mapping[str, tuple[int, int]] | None = None,
        transposed: Collection[str] = (),
        norm_plus: float = 0.0,
        num_experts: int = 0,
    ) -> None:
        self._words = words
        self._fused = fused or {}
        self._transposed = transposed
        self._norm_plus = norm_plus
        self._num_experts = num_experts

    def __call__(self, name: str) -> Source:
        """Where *name* is."""
        stem = name.removesuffix(".bias")
        suffix = "weight" if stem == name else "bias"
        parts = stem.split(".")
        word, stack = parts[-1], None
        if "experts" in parts:
            index = parts[-2]
            parts[-3:] = [self._words[f"experts.{word}"]]
            if "{}" not in parts[-1]:
                stack = (int(index), self._num_experts)
            parts[-1] = parts[-1].format(index)
        return Source(
            tensor=".".join([*(self._words.get(part, part) for part in parts), suffix]),
            stack=stack,
            transposed=word in self._transposed,
            rows=self._fused.get(word),
            plus=self._norm_plus if word.endswith("norm") else 0.0,
        )
