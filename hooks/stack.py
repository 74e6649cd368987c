"""What was chosen, built and frozen: plain objects, of which no hook, look-up or import is left.

`Stack.resolve` turns what one request asks for into one parameter struct for each logits processor. Requests carry
names and numbers, never code, and nothing they ask for is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from .components import Bound
from .decode import did_you_mean
from .errors import BadRequest
from .params import ALIASES, SamplingParams
from .protocols import Phase
from .resolve import ALIASED, NoParams, operators, resolve_params

__all__ = ["Chain", "NoParams", "Stack", "describe_chain", "freeze"]

Chain = tuple[tuple[Phase, tuple[Bound, ...]], ...]
"""Phases in running order, each with its logits processors."""

_DEFAULTS: Final = SamplingParams()
_OFF: Final = {alias: (getattr(_DEFAULTS, alias),) for alias in ALIASES} | {"top_k": (0, -1)}
_ALIASED_PROCESSORS: Final = {processor for processor, _ in ALIASED}


class Stack(Struct, frozen=True, kw_only=True):
    """Everything between a request and its tokens that a configuration can choose.

    Attributes:
        fingerprint: equal for equal distributions, versions, components and options, on any machine.
        revision: counts the stacks of this process, from 0.
    """

    tokenizer: Bound
    chat_template: Bound
    policy: Bound
    chain: Chain
    sampler: Bound
    observers: tuple[Bound, ...]
    fingerprint: str
    stops: tuple[Bound, ...] = ()
    admission: tuple[Bound, ...] = ()
    revision: int = 0

    @property
    def bounds(self) -> tuple[tuple[str, Bound], ...]:
        """Everything in it, each with its slot."""
        groups = {
            "tokenizer": (self.tokenizer,),
            "chat_template": (self.chat_template,),
            "scheduler_policy": (self.policy,),
            "logits_processor": self.processors,
            "sampler": (self.sampler,),
            "stop": self.stops,
            "admission": self.admission,
            "observer": self.observers,
        }
        return tuple((slot, bound) for slot, bounds in groups.items() for bound in bounds)

    @property
    def processors(self) -> tuple[Bound, ...]:
        """The logits processors of all phases, in running order."""
        return tuple(bound for _, group in self.chain for bound in group)

    def resolve(
        self, params: SamplingParams, extra: Mapping[str, Mapping[str, Any]] | None = None
    ) -> tuple[Struct | None, ...]:
        """The parameters of each processor, in running order; None: this request does not use it.

        A processor that a word of `SamplingParams` stands for is used where that word is not at its neutral default.
        Any other one is used by every request, with the operator's options where these are of the same type as its
        parameters, else with its own defaults. *extra* goes over both.

        Args:
            extra: processor → fields, from a request's `headrace.logits`.

        Raises:
            BadRequest: a processor that is not in the chain, or a value out of its range.
            RequestFailed: the processor failed while it looked at them.
        """
        wanted = _wanted(params)
        asked = extra or {}
        enabled = [bound.name for bound in self.processors]
        for name in asked:
            if name not in enabled:
                reason = f"no logits processor called {name!r} is enabled{did_you_mean(name, enabled)}"
                raise BadRequest(f"{reason} (enabled: {', '.join(enabled) or 'none'})", param=_key(name))
        for (name, _), alias in ALIASED.items():
            if alias in wanted and name not in enabled:
                raise BadRequest(f"{alias} needs the logits processor {name}, which is not enabled here", param=alias)
        return tuple(_resolve(bound, wanted, asked.get(bound.name)) for bound in self.processors)

    def resolve_sampler(self, asked: Mapping[str, Any] | None = None) -> Struct:
        """The sampler's parameters: a request's `headrace.sampler` over the operator's over its own defaults.

        Raises:
            BadRequest: a field that it does not have, or a value out of its range.
            RequestFailed: the sampler failed while it looked at them.
        """
        return resolve_params("sampler", self.sampler, ("headrace", "sampler"), asked)

    def resolve_stops(self, asked: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[tuple[Bound, Struct], ...]:
        """Each stop watcher with its parameters, as for the sampler. All of them watch every request.

        Args:
            asked: stop watcher → fields, from a request's `headrace.stop`.

        Raises:
            BadRequest: a stop watcher that is not enabled, or a value out of its range.
            RequestFailed: one failed while it looked at them.
        """
        asked = asked or {}
        enabled = [bound.name for bound in self.stops]
        for name in asked:
            if name not in enabled:
                reason = f"no stop watcher called {name!r} is enabled{did_you_mean(name, enabled)}"
                raise BadRequest(f"{reason} (enabled: {', '.join(enabled) or 'none'})", param=f"headrace.stop.{name}")
        return tuple(
            (bound, resolve_params("stop watcher", bound, ("headrace", "stop", bound.name), asked.get(bound.name)))
            for bound in self.stops
        )


def describe_chain(stack: Stack) -> str:
    """The phases in running order, each with its processors, and the draw; for people, in one line."""
    groups = [*stack.chain, ("draw", (stack.sampler,))]
    return "; ".join(f"{phase}: {', '.join(map(_owned, bounds)) or 'nothing'}" for phase, bounds in groups)


def _owned(bound: Bound) -> str:
    """A component's name, with whose it is where that is not plain."""
    return bound.name if bound.name == bound.plugin else f"{bound.plugin}/{bound.name}"


def freeze(
    *,
    tokenizer: Bound,
    chat_template: Bound,
    policy: Bound,
    chain: Chain,
    sampler: Bound,
    observers: tuple[Bound, ...],
    stops: tuple[Bound, ...] = (),
    admission: tuple[Bound, ...] = (),
    revision: int = 0,
    beside: object = None,
) -> Stack:
    """Make the Stack, with its fingerprint.

    Args:
        beside: what else the fingerprint shall speak of, as plain data; None: nothing.
    """
    groups = {
        "tokenizer": (tokenizer,),
        "chat_template": (chat_template,),
        "scheduler_policy": (policy,),
        **{f"{index} {phase}": bounds for index, (phase, bounds) in enumerate(chain)},
        "sampler": (sampler,),
        "stop": stops,
        "admission": admission,
        "observer": observers,
    }
    words = [
        [slot, bound.plugin, bound.distribution, bound.name, bound.options]
        for slot, bounds in groups.items()
        for bound in bounds
    ]
    # What was read from files, such as a template, is no option; a component may give a digest of it.
    read = {bound.name: bound.component.digest for _, bounds in groups.items() for bound in bounds if _digested(bound)}
    more = [each for each in (read, beside) if each]
    encoded = msgspec.json.encode([words, *more] if more else words, order="deterministic", enc_hook=repr)
    return Stack(
        tokenizer=tokenizer,
        chat_template=chat_template,
        policy=policy,
        chain=chain,
        sampler=sampler,
        observers=observers,
        stops=stops,
        admission=admission,
        revision=revision,
        fingerprint=hashlib.sha256(encoded).hexdigest()[:16],
    )


def _digested(bound: Bound) -> bool:
    return isinstance(getattr(bound.component, "digest", None), str)


def _wanted(params: SamplingParams) -> dict[str, Any]:
    """The words of `SamplingParams` that ask for something, and what."""
    wanted = {alias: getattr(params, alias) for alias in ALIASES}
    return {alias: value for alias, value in wanted.items() if value not in _OFF[alias]}


def _resolve(bound: Bound, wanted: Mapping[str, Any], asked: Mapping[str, Any] | None) -> Struct | None:
    words = {
        target: wanted[alias] for (name, target), alias in ALIASED.items() if name == bound.name and alias in wanted
    }
    if asked is None and not words and operators(bound) is None and bound.name in _ALIASED_PROCESSORS:
        return None
    return resolve_params("logits processor", bound, ("headrace", "logits", bound.name), asked, words)


def _key(name: str) -> str:
    return f"headrace.logits.{name}"
