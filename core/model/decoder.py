"""The parts that decoder-only transformers share. A family calls them in the order in which its model computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from ...hooks.program import Activation, Builder, Program, Source, Value
from .config import Config, Sizes
from .rope import Rotation


class Experts(Struct, frozen=True, kw_only=True):
    """The sparse feed-forward of a family. *width*: of one expert."""

    num_experts: int
    num_selected: int
    width: int
    renormalize: bool


def read_experts(config: Config, width: int, *, renormalize: bool) -> Experts:
    """How many experts a checkpoint has, and how many of them a token takes."""
    return Experts(
        num_experts=config.whole("num_experts"),
        num_selected=config.whole("num_experts_per_tok"),
        width=width,
        renormalize=renormalize,
    )


class Decoder:
    """A Builder that knows a family's sizes.

    Args:
        names: canonical name of a weight → where the checkpoint has it.
        eps: of all norms.
        rotations: all that the layers use; the Program has no more positions than each is right for.
        permuted: rows of Q and K lie as GGUF has them for llama.
    """

    def __init__(
        self,
        sizes: Sizes,
        names: Callable[[str], str | Source],
        *,
        eps: float,
        rotations: Sequence[Rotation] = (),
        permuted: bool = False,
    ) -> None:
        limits = [rotation.max_positions for rotation in rotations if rotation.max_positions is not None]
        self.sizes = sizes
        self.eps = eps
        self.permuted = permuted
        self.b = Builder(
            source=names,
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            max_positions=min([sizes.max_positions, *limits]),
        )

    def norm(self, x: Value, name: str) -> Value:
        """RMS norm over all features."""
        return self.b.norm(x, name, eps=self.eps)

    def attention(
        self,
        h: Value,
        at: str,
        rotation: Rotation | None,
        *,
        window: int | None = None,
        bias: bool = False,
        o_bias: bool = False,
        normed: Literal["heads", "all"] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Attention of layer *at*, from its projections to the one back.

        Args:
            rotation: None: positions are told apart by the mask alone.
            bias: Q, K and V have one.
            normed: whether Q and K are normed before they turn, each head by itself or all at once.
        """
        q = self._heads(h, f"{at}.q", self.sizes.num_heads, bias)
        k = self._heads(h, f"{at}.k", self.sizes.num_kv_heads, bias)
        v = self.b.linear(h, f"{at}.v", self.sizes.num_kv_heads * self.sizes.head_dim, bias=bias)
        if normed is not None:
            width = self.sizes.head_dim if normed == "heads" else None
            q = self.b.norm(q, f"{at}.q_norm", eps=self.eps, width=width)
            k = self.b.norm(k, f"{at}.k_norm", eps=self.eps, width=width)
        if rotation is not None:
            q = self.b.rotate(q, rotation.frequencies, magnitude=rotation.magnitude)
            k = self.b.rotate(k, rotation.frequencies, magnitude=rotation.magnitude)
        attended = self.b.attend(q, k, v, scale=scale, window=window, softcap=softcap)
        return self.b.linear(attended, f"{at}.o", self.sizes.hidden_size, bias=o_bias)

    def feed_forward(
        self, h: Value, at: str, width: int, *, activation: Activation = "silu", bias: bool = False
    ) -> Value:
        """The gated feed-forward of layer *at*."""
        gate, up = (self.b.linear(h, f"{at}.{name}", width, bias=bias) for name in ("gate", "up"))
        return self.b.linear(self.b.gated(gate, up, activation), f"{at}.down", self.sizes.hidden_size, bias=bias)

    def mixture(self, h: Value, at: str, experts: Experts, *, activation: Activation = "silu") -> Value:
        """The sparse feed-forward of layer *at*."""
        return self.b.moe(
            h,
            at,
            experts.width,
            num_experts=experts.num_experts,
            num_selected=experts.num_selected,
            renormalize=experts.renormalize,
            activation=activation,
        )

    def finish(self, x: Value, *, softcap: float | None = None) -> Program:
        """The last norm, the head, and the Program."""
        logits = self.b.head(self.norm(x, "norm"), "embed" if self.sizes.tied else "head")
        if softcap is not None:
            self.b.softcap(logits, softcap)
        return self.b.build()

    def _heads(self, h: Value, name: str, num_heads: int, bias: bool) -> Value:
        permuted_heads = num_heads if self.permuted else 0
        return self.b.linear(h, name, num_heads * self.sizes.head_dim, bias=bias, permuted_heads=permuted_heads)
