"""Logits processor `repetition`: makes tokens of prompt and output less likely.

Source: Keskar et al. 2019, CTRL, arXiv:1909.05858, section 4.1; with negative logits multiplied, as transformers does.
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
    penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""


class Repetition:
    phase: ClassVar[Phase] = "penalty"
    fused: ClassVar[Mapping[str, str]] = {"repetition": "penalty"}

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._penalties = [1.0] * context.sampling.num_slots

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._penalties[slot] = params.penalty
        return params.penalty != 1

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row: Any
        seen: Any
        for row, slot in zip(logits, rows.slots, strict=True):
            seen, penalty = rows.history.seen(slot), self._penalties[slot]
            if row.device.type == "cpu":
                # Of a few hundred numbers numpy makes less ado, and does not give the interpreter away in between.
                row, seen = row.numpy(), seen.numpy()
            values = row[seen]
            negative = values < 0
            values[negative] *= penalty
            values[~negative] /= penalty
            row[seen] = values
        return logits


@plugin
def register_logits_processor(register: Register) -> None:
    register("repetition", Repetition, params=Params, doc="Make tokens of prompt and output less likely.")
