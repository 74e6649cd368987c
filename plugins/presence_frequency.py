"""Logits processor `presence-frequency`: makes tokens of the output less likely, once and for each time.

Source: OpenAI API reference, parameter details: logit - count · frequency - (count > 0) · presence, counted over drawn
tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

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
    fused: ClassVar[Mapping[str, str]] = {"presence": "presence", "frequency": "frequency"}

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._params = [Params()] * context.sampling.num_slots

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._params[slot] = params
        return params.presence != 0 or params.frequency != 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row: Any
        ids: Any
        counts: Any
        for row, slot in zip(logits, rows.slots, strict=True):
            (ids, counts), params = rows.history.output_counts(slot), self._params[slot]
            if row.device.type == "cpu":
                # Of a few hundred numbers numpy makes less ado, and does not give the interpreter away in between.
                row, ids, counts = row.numpy(), ids.numpy(), counts.numpy()
            row[ids] -= counts * params.frequency + params.presence
        return logits


@plugin
def register_logits_processor(register: Register) -> None:
    register("presence-frequency", PresenceFrequency, params=Params, doc="Make tokens of the output less likely.")
