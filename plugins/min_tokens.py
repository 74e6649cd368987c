"""Logits processor `min-tokens`: no end token before the answer has so many."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens before which no end token can be drawn."""


class MinTokens:
    phase: ClassVar[Phase] = "mask"
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._vocab_size = context.sampling.vocab_size
        self._device = context.sampling.device
        self._counts = [0] * context.sampling.num_slots
        self._end_ids = [torch.empty(0, dtype=torch.int64)] * context.sampling.num_slots

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        # A request may name stop ids that the model does not have; those are never drawn anyway.
        end_ids = sorted(token_id for token_id in admitted.end_ids if token_id < self._vocab_size)
        self._counts[slot] = params.count
        self._end_ids[slot] = torch.tensor(end_ids, dtype=torch.int64, device=self._device)
        return bool(end_ids) and len(admitted.output_ids) < params.count

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        for row, (slot, num_outputs) in enumerate(zip(rows.slots, rows.num_outputs, strict=True)):
            if num_outputs < self._counts[slot]:
                logits[row].index_fill_(0, self._end_ids[slot], -math.inf)
        return logits


@plugin
def register_logits_processor(register: Register) -> None:
    register("min-tokens", MinTokens, params=Params, doc="Rule out end tokens while the answer is short.")
