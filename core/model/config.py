"""A checkpoint's settings, by one name each, whichever format they come from.

The names are Hugging Face's; `GGUF` tells what a GGUF file calls them. A setting that a format has no word for is
absent there, and the family says what that means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from ...hooks.errors import ModelError
from ...hooks.program import Activation, Checkpoint
from .metadata import number, whole, wrong

GGUF = {
    "attention_scale": "attention.scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "max_position_embeddings": "context_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rope_theta": "rope.freq_base",
    "rotary_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "value_head_dim": "attention.value_length",
    "vocab_size": "vocab_size",
}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Config:
    """Reads the settings of one checkpoint. Every method raises ModelError with the name that the checkpoint uses.

    Args:
        words: Hugging Face's name in general → in this family's configs.
    """

    def __init__(self, checkpoint: Checkpoint, words: Mapping[str, str] | None = None) -> None:
        self.checkpoint = checkpoint
        self._prefix = f"{checkpoint.architecture}."
        # GGUF puts a family's keys under its name; no key of a config.json has a dot in it.
        self.from_gguf = any(key.startswith(self._prefix) for key in checkpoint.metadata)
        self._words = words or {}

    def key(self, word: str) -> str:
        """What this checkpoint calls *word*."""
        if self.from_gguf:
            return self._prefix + GGUF[word] if word in GGUF else word
        return self._words.get(word, word)

    def get(self, word: str) -> Any:
        """Any value; None where it is absent or null."""
        return self.checkpoint.metadata.get(self.key(word))

    def whole(self, word: str, default: int | None = None, *, least: int = 1) -> int:
        """A size or a count of at least *least*."""
        return whole(self.checkpoint, self.key(word), default, least=least)

    def number(self, word: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return number(self.checkpoint.metadata, self.key(word), self.checkpoint, default)

    def eps(self, absent: float) -> float:
        """What norms add to the variance. A GGUF file must say it; *absent* where a Hugging Face config does not."""
        return self.number("rms_norm_eps", None if self.from_gguf else absent)

    def optional(self, word: str, absent: float | None = None) -> float | None:
        """A number above 0, or None where it is null; *absent* where nothing is said."""
        value = self.checkpoint.metadata.get(self.key(word), absent)
        return None if value is None else self.number(word, absent)

    def flag(self, word: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(word)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(word, "true or false")
        return value

    def expect(self, word: str, only: object) -> None:
        """Refuse any value but *only* and none."""
        found = self.get(word)
        if found is not None and found != only:
            raise self.wrong(word, f"{only} (nothing else is supported yet)")

    def wrong(self, word: str, expected: str) -> ModelError:
        """The error for the value of *word*."""
        return wrong(self.checkpoint, self.key(word), expected, self.get(word))

    def has(self, tensor: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        return tensor in self.checkpoint.shapes

    def activation(self, word: str = "hidden_act", default: str = "silu") -> Activation:
        """The activation under its name in a Program."""
        name = self.get(word) or default
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise self.wrong(word, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def window(self, absent: int | None = None) -> int | None:
        """Tokens that attention sees where it slides; None, null or 0: all. *absent* where nothing is said."""
        value = self.checkpoint.metadata.get(self.key("sliding_window"), absent)
        return None if value in (None, 0) else self.whole("sliding_window", absent)

    def windows(self, num_layers: int, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
        """The window of each layer: as the checkpoint lists them, else *window* in those that *slides* tells."""
        listed = self._listed_windows(num_layers)
        if listed is None:
            listed = [slides(i) for i in range(num_layers)]
        return [window if sliding else None for sliding in listed]

    def _listed_windows(self, num_layers: int) -> list[bool] | None:
        if not self.from_gguf:
            return self._listed("layer_types", num_layers, {"sliding_attention": True, "full_attention": False})
        if isinstance(self.get("sliding_window_pattern"), int):
            period = self.whole("sliding_window_pattern")
            return [i % period < period - 1 for i in range(num_layers)]
        return self._listed("sliding_window_pattern", num_layers, {True: True, False: False})

    def _listed(self, word: str, num_layers: int, meanings: Mapping[Any, bool]) -> list[bool] | None:
        """A list with one of *meanings* a layer."""
        found = self.get(word)
        if found is None:
            return None
        known = isinstance(found, list) and all(isinstance(kind, str | int) and kind in meanings for kind in found)
        if not known or len(found) != num_layers:
            raise self.wrong(word, f"a list of {num_layers}, each one of {', '.join(map(str, meanings))}")
        return [meanings[kind] for kind in found]


class Sizes(Struct, frozen=True, kw_only=True):
    """What all families have. *tied*: the head is the embedding."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied: bool


MAX_HEAD_DIM = 1 << 14


def read_sizes(
    config: Config, *, tied: bool = False, head_dim: int | None = None, max_positions: int | None = None
) -> Sizes:
    """The sizes of a checkpoint.

    Args:
        tied, head_dim, max_positions: what a Hugging Face config means that does not say. None: hidden_size / num_heads
            for *head_dim*, and an error for *max_positions*.
    """
    shapes = config.checkpoint.shapes
    num_layers = config.whole("num_hidden_layers")
    if num_layers > len(shapes):
        raise wrong(config.checkpoint, "the number of layers", f"at most {len(shapes)}, one a tensor", num_layers)
    hidden_size, num_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if head_dim is None or config.from_gguf:
        head_dim = hidden_size // num_heads
    head_dim = config.whole("head_dim", head_dim)
    if head_dim > MAX_HEAD_DIM:
        # Rotations are computed before any shape is compared, so a corrupt size must not get that far.
        raise wrong(config.checkpoint, "the size of a head", f"at most {MAX_HEAD_DIM}", head_dim)
    config.expect("value_head_dim", head_dim)
    if config.from_gguf:
        embed = shapes.get("token_embd.weight", ())
        vocab_size, tied = embed[0] if embed else config.whole("vocab_size"), not config.has("output.weight")
    else:
        vocab_size = config.whole("vocab_size")
        # A head in the file counts in spite of the flag, as with transformers; mostly it repeats the embedding.
        tied = config.flag("tie_word_embeddings", tied) and not config.has("lm_head.weight")
    return Sizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.whole("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=config.whole("max_position_embeddings", None if config.from_gguf else max_positions),
        tied=tied,
    )
