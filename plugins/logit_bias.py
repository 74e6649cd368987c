"""Logits processor `logit-bias`: adds a number to the logits of some tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct, field
from torch import Tensor

from ..hooks.errors import BadRequest
from ..hooks.messages import Admit
from ..hooks.params import TokenId
from ..hooks.protocols import Context, Phase, Register, Rows
from ..hooks.registry import plugin

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    """Added to the logits of these tokens."""


class LogitBias:
    phase: ClassVar[Phase] = "bias"
    speculative: ClassVar[bool] = True

    def __init__(self, context: Context, options: None) -> None:
        assert context.sampling is not None
        self._vocab_size = context.sampling.vocab_size
        self._device = context.sampling.device
        none = torch.empty(0)
        self._biases = [(none.long(), none)] * context.sampling.num_slots

    def check(self, params: Params) -> None:
        """Refuse ids the model does not have.

        Raises:
            BadRequest: names the id.
        """
        for token_id in params.bias:
            if token_id >= self._vocab_size:
                message = f"logit_bias: token ids must be under {self._vocab_size}, found {token_id}"
                raise BadRequest(message, param="logit_bias")

    def admit(self, slot: int, params: Params, admitted: Admit) -> bool:
        self.check(params)
        ids = torch.tensor(list(params.bias), dtype=torch.int64, device=self._device)
        self._biases[slot] = ids, torch.tensor(list(params.bias.values()), device=self._device)
        return any(params.bias.values())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        own = [self._biases[slot] for slot in rows.slots]
        places = torch.cat([ids + row * logits.shape[1] for row, (ids, _) in enumerate(own)])
        logits.view(-1)[places] += torch.cat([biases for _, biases in own])
        return logits


@plugin
def register_logits_processor(register: Register) -> None:
    register("logit-bias", LogitBias, params=Params, doc="Add a number to the logits of some tokens.")
