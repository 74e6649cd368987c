"""Sampler `mirostat`: keeps the surprise of the answer near a target, by cutting off what would be too surprising.

    [sampling.sampler]
    use = "mirostat"
    options = { tau = 5.0, eta = 0.1 }

and in a request `"headrace": {"sampler": {"tau": 3.0}}`. Other truncation is best left off. Temperature 0 stays greedy.

Source: Basu et al. 2021, Mirostat, arXiv:2007.14966, in its second version: tokens more surprising than mu bits are
ruled out, one is drawn, and mu moves by eta · (its surprise among those left - tau). It starts at 2 · tau.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..hooks.messages import Admit
from ..hooks.protocols import Context, Register, Rows
from ..hooks.registry import plugin
from .categorical import draw
from .top_k import keep_from

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tau: Annotated[float, Meta(gt=0, le=100)] = 5.0
    """Bits of surprise a token shall have on average."""
    eta: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """How fast mu follows."""


class Mirostat:
    """Keeps mu by slot, through preemption and parking. What it draws depends on what it drew before: no guesses."""

    def __init__(self, context: Context, options: Params) -> None:
        assert context.sampling is not None
        self._tau = torch.zeros(context.sampling.num_slots, dtype=torch.float64, device=context.sampling.device)
        self._eta = torch.zeros_like(self._tau)
        self._mu = torch.zeros_like(self._tau)

    def admit(self, slot: int, params: Params, admitted: Admit) -> None:
        self._tau[slot] = params.tau
        self._eta[slot] = params.eta
        self._mu[slot] = 2 * params.tau

    def sample(self, logits: Tensor, uniforms: Tensor, rows: Rows) -> Tensor:
        slots = torch.tensor(rows.slots, device=logits.device)
        # Row by row: what a row needs in between then stays in the processor's cache.
        shares, tops = torch.stack([row.softmax(-1).amax() for row in logits]), logits.amax(-1)
        # What is at most mu bits surprising has a logit at least so large. The likeliest token always stays.
        floors = tops - shares.log() - self._mu[slots].float() * math.log(2)
        keep_from(logits, list(range(len(logits))), torch.minimum(floors, tops))
        weights = logits.softmax(-1)
        ids = draw(weights, uniforms)
        observed = -weights.gather(1, ids[:, None])[:, 0].double().log2()
        self._mu[slots] -= self._eta[slots] * (observed - self._tau[slots])
        return ids


@plugin
def register_sampler(register: Register) -> None:
    register("mirostat", Mirostat, config=Params, params=Params, doc="Keep the surprise of the answer near a target.")
