"""Logits processor `presence-frequency`: makes tokens of the output less likely, once and for each time.

Source: OpenAI API reference, parameter details: logit - count · frequency - (count > 0) · presence, counted over drawn
tokens only.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    presence: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted once from tokens in the output."""
    frequency: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted once for each time a token stands in the output."""


class PresenceFrequency:
    phase: ClassVar[Phase] = "penalty"

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._presences = torch.zeros(context.sampling.num_slots, device=context.sampling.device)
        self._frequencies = torch.zeros_like(self._presences)

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._presences[slot] = params.presence
        self._frequencies[slot] = params.frequency
        return params.presence != 0 or params.frequency != 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        drawn = [rows.history.output_counts(slot) for slot in rows.slots]
        places = torch.cat([ids + row * logits.shape[1] for row, (ids, _) in enumerate(drawn)])
        counts = torch.cat([counts for _, counts in drawn])
        lengths = torch.tensor([len(ids) for ids, _ in drawn], device=logits.device)
        frequencies = self._frequencies[rows.slots].repeat_interleave(lengths)
        presences = self._presences[rows.slots].repeat_interleave(lengths)
        logits.view(-1)[places] -= counts * frequencies + presences
        return logits


@plugin
def register_logits_processor(register: Register) -> None:
    register("presence-frequency", PresenceFrequency, params=Params, doc="Make tokens of the output less likely.")
