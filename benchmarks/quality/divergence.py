"""How far one row of logits lies from another: KL divergence, and whether both name the same token first.

Receives logits of the same positions from two ways to compute a model; knows no model and no text.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

ROWS_AT_ONCE = 32
"""Rows compared in one go: in float64 a row of a large vocabulary takes a few megabytes."""


class Summary(Struct, frozen=True, kw_only=True):
    """What a text says of a way to compute.

    Attributes:
        num_positions: rows that were compared.
        mean_kl: mean KL(reference ‖ other), in nats.
        mean_kl_error: standard error of that mean, positions taken as independent.
        p99_kl: the divergence that one position in a hundred exceeds.
        max_kl: the largest.
        top1: share of positions whose most likely token is the reference's.
    """

    num_positions: int
    mean_kl: float
    mean_kl_error: float
    p99_kl: float
    max_kl: float
    top1: float


class Divergence:
    """Gathers positions, a context at a time, and keeps two numbers of each."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, reference: Tensor, other: Tensor) -> None:
        """Compare two `[num_rows, vocab_size]` logits, row by row.

        Raises:
            ValueError: the shapes differ, or a logit is NaN.
        """
        if reference.shape != other.shape:
            raise ValueError(f"logits must have one shape, got {list(reference.shape)} and {list(other.shape)}")
        if reference.isnan().any() or other.isnan().any():
            raise ValueError("logits must be numbers, found NaN: the model is broken, not merely inexact")
        self._kl.append(kl_rows(reference, other))
        self._same.append(reference.argmax(-1) == other.argmax(-1))

    def summary(self) -> Summary:
        """Over all rows added; at least one must have been."""
        kl, same = torch.cat(self._kl), torch.cat(self._same)
        return Summary(
            num_positions=len(kl),
            mean_kl=kl.mean().item(),
            mean_kl_error=kl.std(correction=0).item() / len(kl) ** 0.5,
            p99_kl=kl.quantile(0.99).item(),
            max_kl=kl.max().item(),
            top1=same.double().mean().item(),
        )


def kl_rows(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference ‖ other) of each row of two `[num_rows, vocab_size]` logits, in nats, `[num_rows]` float64.

    A token that the reference excludes (-inf) adds nothing, whatever the other says of it.
    """
    parts = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(reference), ROWS_AT_ONCE)]
    return torch.cat([_kl(reference[part], other[part]) for part in parts])


def _kl(reference: Tensor, other: Tensor) -> Tensor:
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (reference, other))
    terms = log_p.exp() * (log_p - log_q)
    return terms.masked_fill(log_p == -torch.inf, 0).sum(-1)
