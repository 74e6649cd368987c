"""Builds sampling states from the built-in processors, and a few strangers to put among them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from headrace.core.kernels.native.draw import Drawer
from headrace.core.sampling import SamplingState
from headrace.hooks.components import Bound
from headrace.hooks.messages import Admit
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Context, SamplingContext
from headrace.plugins import (
    categorical,
    logit_bias,
    min_p,
    min_tokens,
    presence_frequency,
    repetition,
    temperature,
    top_k,
    top_p,
)

DEFAULT = [
    [("logit-bias", logit_bias.LogitBias, logit_bias.Params)],
    [
        ("repetition", repetition.Repetition, repetition.Params),
        ("presence-frequency", presence_frequency.PresenceFrequency, presence_frequency.Params),
    ],
    [("min-tokens", min_tokens.MinTokens, min_tokens.Params)],
    [("temperature", temperature.Temperature, temperature.Params)],
    [
        ("top-k", top_k.TopK, top_k.Params),
        ("top-p", top_p.TopP, top_p.Params),
        ("min-p", min_p.MinP, min_p.Params),
    ],
]


class Params(Struct, frozen=True, forbid_unknown_fields=True):
    """For strangers, which want none."""


class Stranger:
    """A logits processor that does what *action* does, and notes what it was shown."""

    phase = "mask"

    def __init__(self, action: Any = lambda logits, rows: logits, phase: str = "mask") -> None:
        self.action = action
        self.phase = phase
        self.shown: list[tuple[torch.Tensor, list[int]]] = []

    def admit(self, slot: int, params: Any, admitted: Admit) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        self.shown.append((logits.clone(), rows.slots))
        return self.action(logits, rows)


class Spy:
    """A sampler that notes the logits it was given, and draws as *sampler* does."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.fused = getattr(sampler, "fused", None)
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, uniforms: torch.Tensor, rows: Any) -> torch.Tensor:
        self.logits.append(logits.clone())
        return self.sampler.sample(logits, uniforms, rows)


class Line:
    """A sampling state with the default chain, or the strangers, and how to talk to it."""

    def __init__(
        self,
        vocab_size: int,
        *,
        num_slots: int = 8,
        strangers: Sequence[Stranger] = (),
        sampler: Any = None,
        drawer: Drawer | None = None,
    ) -> None:
        context = Context(sampling=SamplingContext(vocab_size=vocab_size, num_slots=num_slots))
        self.names = [name for group in DEFAULT for name, _, _ in group]
        self.params = {name: params for group in DEFAULT for name, _, params in group}
        chain = [
            [Bound(name=name, plugin="ours", component=component(context, None)) for name, component, _ in group]
            for group in DEFAULT
        ]
        chain.append([Bound(name=f"stranger-{i}", plugin="theirs", component=own) for i, own in enumerate(strangers)])
        self.num_strangers = len(strangers)
        self.spy = Spy(sampler or categorical.Categorical(context, None))
        self.state = SamplingState(
            num_slots=num_slots,
            vocab_size=vocab_size,
            chain=chain,
            sampler=Bound(name="spy", plugin="spies", component=self.spy),
            drawer=drawer,
        )

    def op(
        self,
        slot: int,
        *,
        chain: Mapping[str, Mapping[str, Any]] | None = None,
        strangers: Sequence[int] = (),
        choice: int = 0,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        end_ids: frozenset[int] = frozenset(),
        **params: Any,
    ) -> Admit:
        """The operation that admits a sequence; *chain*: processor → its parameters, *strangers*: which it uses."""
        chain = dict(chain or {})
        params = {"seed": 1, **params}
        if "temperature" in params:
            chain.setdefault("temperature", {"value": params["temperature"]})
        own = [self.params[name](**chain[name]) if name in chain else None for name in self.names]
        others = [Params() if i in strangers else None for i in range(self.num_strangers)]
        return Admit(
            slot=slot,
            choice=choice,
            params=SamplingParams(**params),
            chain=(*own, *others),
            end_ids=end_ids,
            prompt_ids=array("i", prompt),
            output_ids=array("i", output),
        )

    def admit(self, slot: int, **kwargs: Any) -> None:
        self.state.apply_ops((self.op(slot, **kwargs),))

    def draw(self, logits: Any, slots: Sequence[int], positions: Sequence[int] | None = None) -> Any:
        rows = torch.as_tensor(logits, dtype=torch.float32).clone()
        return self.state.draw(rows, list(slots), list(positions or [0] * len(slots)))

    def candidates(self, logits: Sequence[float], **kwargs: Any) -> torch.Tensor:
        """What the sampler may draw from, for one request with these logits."""
        self.admit(0, **kwargs)
        self.draw([logits], [0], [len(kwargs.get("output", ()))])
        return self.spy.logits[-1][0]
