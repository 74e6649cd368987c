"""Logits processor `top-k`: keeps the k likeliest tokens. Of equals at the border the smallest ids stay.

Source: Fan et al. 2018, Hierarchical Neural Story Generation, arXiv:1805.04833, section 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1

NARROW = 256
"""A row with a larger k is worked on alone, for all rows of one `topk` pay for its widest."""


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    """Keep the k likeliest tokens. 0 and -1: off."""


class TopK:
    phase: ClassVar[Phase] = "truncate"
    fused: ClassVar[Mapping[str, str]] = {"top_k": "k"}
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._vocab_size = context.sampling.vocab_size
        self._k = [0] * context.sampling.num_slots

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._k[slot] = params.k
        return 0 < params.k < self._vocab_size

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        counts = [self._k[slot] for slot in rows.slots]
        narrow = [row for row, count in enumerate(counts) if count <= NARROW]
        wide = [[row] for row, count in enumerate(counts) if count > NARROW]
        for group in [narrow, *wide] if narrow else wide:
            part = logits if len(group) == len(counts) else logits[group]
            kept = [counts[row] for row in group]
            keep_likeliest(logits, group, part.topk(max(kept) + 1).values, kept)
        return logits


def keep_likeliest(logits: Tensor, rows: list[int], values: Tensor, counts: list[int]) -> None:
    """Rule out all but the *counts* (each at least 1) likeliest tokens of some rows, in place.

    Args:
        logits: `[num_rows, vocab_size]`.
        rows: which rows of *logits*.
        values: `[len(rows), width]`, the largest logits of those rows, descending: one more than are kept, where the
            row has one more.
    """
    last = torch.tensor(counts, device=logits.device)[:, None] - 1
    floors = values.gather(1, last)
    following = values.gather(1, (last + 1).clamp(max=values.shape[1] - 1))
    tied = (floors == following) & (last + 1 < values.shape[1]) & (floors > -math.inf)
    keep_from(logits, rows, floors[:, 0])
    for index in tied[:, 0].nonzero()[:, 0].tolist():
        drop_equals(logits[rows[index]], counts[index])


def drop_equals(row: Tensor, count: int) -> None:
    """Of the equals at the border of a row that was cut, rule out the largest ids until *count* tokens are left."""
    kept = (row > -math.inf).nonzero()[:, 0]
    values = row[kept]
    equals = kept[values == values.min()]
    row[equals[len(equals) - (len(kept) - count) :]] = -math.inf


def keep_from(logits: Tensor, rows: list[int], floors: Tensor) -> None:
    """Rule out logits under the *floors* `[len(rows)]` of some rows, in place."""
    under = torch.nextafter(floors, torch.full_like(floors, -math.inf)).tolist()
    for row, limit in zip(rows, under, strict=True):
        # Several times as fast as a comparison and a masked fill of the batch.
        torch.threshold_(logits[row], limit, -math.inf)


def places(values: Tensor, compare: Callable[[Any, Any], Any], other: float) -> Tensor:
    """Where *compare* (of `operator`) holds: ascending places in the flattened *values*, int64."""
    if values.device.type == "cpu":
        # Several times as fast as a comparison in torch and its `nonzero`.
        return torch.from_numpy(np.flatnonzero(compare(values.numpy(), other)))
    found: Tensor = compare(values, other)
    return found.view(-1).nonzero()[:, 0]


@plugin
def register_logits_processor(register: Register) -> None:
    register("top-k", TopK, params=Params, doc="Keep the k likeliest tokens.")
