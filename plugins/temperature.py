"""Logits processor `temperature`: divides the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.params import GREEDY_BELOW
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    value: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Under 1 sharpens, over 1 flattens; 0 (and anything under 1e-5) is greedy and divides nothing."""


class Temperature:
    phase: ClassVar[Phase] = "temperature"
    fused: ClassVar[Mapping[str, str]] = {"temperature": "value"}
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._values = torch.ones(context.sampling.num_slots, device=context.sampling.device)

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self._values[slot] = params.value
        return params.value >= GREEDY_BELOW and params.value != 1

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits.div_(self._values[rows.slots, None])


@plugin
def register_logits_processor(register: Register) -> None:
    register("temperature", Temperature, params=Params, doc="Divide the logits: under 1 sharpens, over 1 flattens.")
