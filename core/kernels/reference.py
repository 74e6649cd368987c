"""A Program interpreted in torch, one operation at a time, in float32.

This is what a Program means: slow, short, and the oracle of all other ways to run one. It receives a `Batch` and gives
logits; it knows nothing of requests, schedules or blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...hooks.program import (
    Activate,
    Add,
    Attend,
    Embed,
    Gated,
    Head,
    LayerNorm,
    Linear,
    Moe,
    Norm,
    Op,
    Position,
    Program,
    Rotate,
    Scale,
    Softcap,
    operands,
)
from ...hooks.protocols import Attention
from ...hooks.protocols import Linear as Multiply
from ..kv.store import KVStore
from . import Batch, Flat, as_tensors

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class ReferenceModel:
    """Runs a Program. Implements `core.kernels.Model`.

    Args:
        tensors: weights that are used as they are, those of `Program.plain`.
        linears: what the quantizer made of each of `Program.matrices`.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, Multiply],
        store: KVStore,
        attention: Attention,
    ) -> None:
        self.program = program
        self.vocab_size = program.vocab_size
        self.store = store
        self.tensors = tensors
        self.linears = linears
        self._attention = attention
        self._layers = [store.layer(i) for i in range(program.num_layers)]
        self._frequencies = {
            (op.frequencies, op.magnitude): torch.tensor(op.frequencies, dtype=torch.float32, device=store.pool.device)
            for op in program.ops
            if isinstance(op, Rotate)
        }
        self._last_uses = _last_uses(program.ops)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits `[num_samples, vocab_size]`; writes keys and values of all tokens of *batch*."""
        plan = self.plan(batch)
        turns = {key: _turns(batch.positions, tensor, key[1]) for key, tensor in self._frequencies.items()}
        values: dict[int, Tensor] = {}
        for i, op in enumerate(self.program.ops):
            values[i] = self.run(op, values, batch, plan, turns)
            for last in self._last_uses[i]:
                del values[last]
        return values[len(self.program.ops) - 1]

    def forward_flat(self, flat: Flat) -> Tensor:
        """The same for arrays."""
        return self.forward(as_tensors(flat))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy KV blocks, (source, target), all layers."""
        self.store.copy(pairs)

    def plan(self, batch: Batch) -> Any:
        """What the attention of all layers shares in a step."""
        return self._attention.plan(batch)

    def run(
        self, op: Op, values: Mapping[int, Tensor], batch: Batch, plan: Any, turns: Mapping[Any, Any] | None = None
    ) -> Tensor:
        """What *op* makes of *values*. *turns* are needed by `Rotate` alone."""
        match op:
            case Linear():
                return self.linears[op.weight](values[op.x])
            case Norm():
                return _norm(values[op.x], self.tensors[op.weight], op.eps)
            case Rotate():
                assert turns is not None
                return _rotate(values[op.x], op.head_dim, *turns[op.frequencies, op.magnitude])
            case Attend():
                return self._attend(op, values[op.query], values[op.key], values[op.value], plan)
            case Gated():
                return ACTIVATIONS[op.activation](values[op.gate]) * values[op.up]
            case Add():
                return values[op.a] + values[op.b]
            case Embed():
                return self.tensors[op.weight][batch.token_ids]
            case Head():
                return self.linears[op.weight](values[op.x][batch.sample_rows])
            case LayerNorm():
                x = values[op.x]
                return F.layer_norm(x, x.shape[-1:], self.tensors[op.weight], self.tensors[op.bias], op.eps)
            case Activate():
                return ACTIVATIONS[op.activation](values[op.x])
            case Position():
                return self.tensors[op.weight][batch.positions]
            case Scale():
                return values[op.x] * op.factor
            case Softcap():
                return torch.tanh(values[op.x] / op.cap) * op.cap
            case Moe():
                return self._moe(op, values[op.x])

    def _attend(self, op: Attend, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        query, key, value = (x.reshape(len(x), -1, self.program.head_dim) for x in (query, key, value))
        kv = self._layers[op.layer]
        self._attention.write(kv, key, value, plan)
        out = self._attention.attend(query, kv, plan, scale=op.scale, window=op.window, softcap=op.softcap)
        return out.flatten(1)

    def _moe(self, op: Moe, x: Tensor) -> Tensor:
        probabilities, chosen = self.linears[op.router](x).softmax(-1).topk(op.num_selected)
        if op.renormalize:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(op.experts):
            rows, ranks = torch.where(chosen == i)
            if len(rows):
                gate, up = self.linears[expert.gate](x[rows]), self.linears[expert.up](x[rows])
                answer = self.linears[expert.down](ACTIVATIONS[op.activation](gate) * up)
                out.index_add_(0, rows, answer * probabilities[rows, ranks, None])
        return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    runs = x.reshape(len(x), -1, len(weight))
    return (runs * torch.rsqrt(runs.square().mean(-1, keepdim=True) + eps) * weight).view(x.shape)


def _turns(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, `[num_tokens, 1, 2 · num_pairs]`, to be broadcast over heads."""
    angles = (positions.to(torch.float32)[:, None] * frequencies)[:, None]
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rotate(x: Tensor, head_dim: int, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    heads = x.reshape(len(x), -1, head_dim)
    turned = heads[..., :width]
    turned = torch.addcmul(turned * cos, turned.roll(width // 2, -1), sin)
    return (turned if width == head_dim else torch.cat((turned, heads[..., width:]), -1)).flatten(1)


def _last_uses(ops: tuple[Op, ...]) -> list[list[int]]:
    """For each operation, the values nobody reads after it: a chunk of prefill would keep a gigabyte of them."""
    last = {i: i for i in range(len(ops) - 1)}
    for i, op in enumerate(ops):
        last |= dict.fromkeys(operands(op), i)
    uses: list[list[int]] = [[] for _ in ops]
    for value, i in last.items():
        uses[i].append(value)
    return uses
