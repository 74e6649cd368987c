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
from .decode import Problem, convert, decode, did_you_mean
from .errors import BadRequest, RequestFailed
from .origins import Where
from .params import ALIASES, SamplingParams
from .protocols import Phase

Chain = tuple[tuple[Phase, tuple[Bound, ...]], ...]
"""Phases in running order, each with its logits processors."""

_DEFAULTS: Final = SamplingParams()
_ALIASED: Final = {target: alias for alias, target in ALIASES.items()}
_OFF: Final = {alias: (getattr(_DEFAULTS, alias),) for alias in ALIASES} | {"top_k": (0, -1)}
_ALIASED_PROCESSORS: Final = {processor for processor, _ in _ALIASED}


class NoParams(Struct, frozen=True, forbid_unknown_fields=True):
    """What a processor without parameters is given: it is in use, for every request."""


class Stack(Struct, frozen=True, kw_only=True):
    """Everything between a request and its tokens that a configuration can choose.

    Attributes:
        fingerprint: equal for equal distributions, versions, components and options, on any machine.
    """

    tokenizer: Bound
    chat_template: Bound
    policy: Bound
    chain: Chain
    sampler: Bound
    observers: tuple[Bound, ...]
    fingerprint: str

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
        for (name, _), alias in _ALIASED.items():
            if alias in wanted and name not in enabled:
                raise BadRequest(f"{alias} needs the logits processor {name}, which is not enabled here", param=alias)
        return tuple(_resolve(bound, wanted, asked.get(bound.name)) for bound in self.processors)


def freeze(
    *, tokenizer: Bound, chat_template: Bound, policy: Bound, chain: Chain, sampler: Bound, observers: tuple[Bound, ...]
) -> Stack:
    """Make the Stack, with its fingerprint."""
    groups = {
        "tokenizer": (tokenizer,),
        "chat_template": (chat_template,),
        "scheduler_policy": (policy,),
        **{f"{index} {phase}": bounds for index, (phase, bounds) in enumerate(chain)},
        "sampler": (sampler,),
        "observer": observers,
    }
    words = [
        [slot, bound.plugin, bound.distribution, bound.name, bound.options]
        for slot, bounds in groups.items()
        for bound in bounds
    ]
    encoded = msgspec.json.encode(words, order="deterministic", enc_hook=repr)
    return Stack(
        tokenizer=tokenizer,
        chat_template=chat_template,
        policy=policy,
        chain=chain,
        sampler=sampler,
        observers=observers,
        fingerprint=hashlib.sha256(encoded).hexdigest()[:16],
    )


def _wanted(params: SamplingParams) -> dict[str, Any]:
    """The words of `SamplingParams` that ask for something, and what."""
    wanted = {alias: getattr(params, alias) for alias in ALIASES}
    return {alias: value for alias, value in wanted.items() if value not in _OFF[alias]}


def _resolve(bound: Bound, wanted: Mapping[str, Any], asked: Mapping[str, Any] | None) -> Struct | None:
    fields = {
        target: wanted[alias] for (name, target), alias in _ALIASED.items() if name == bound.name and alias in wanted
    }
    operator = bound.options if bound.params is not None and type(bound.options) is bound.params else None
    if asked is None and not fields and operator is None and bound.name in _ALIASED_PROCESSORS:
        return None
    if asked is not None and not isinstance(asked, Mapping):
        raise BadRequest(f"{_key(bound.name)}: must be an object, got {asked!r}", param=_key(bound.name))
    values = {**(msgspec.to_builtins(operator) if operator else {}), **fields, **(asked or {})}
    resolved = _decode(bound, values, asked or {})
    _check(bound, resolved)
    return resolved


def _decode(bound: Bound, values: Mapping[str, Any], asked: Mapping[str, Any]) -> Struct:
    kind = bound.params or NoParams
    try:
        made: Struct = convert(values, kind)
    except msgspec.ValidationError:
        problems: list[Problem] = []
        decode(values, kind, Where(("headrace", "logits", bound.name)), problems)
        keys = [_blame(bound, problem, asked) for problem in problems]
        reasons = "; ".join(f"{key}: {problem.reason}" for key, problem in zip(keys, problems, strict=True))
        raise BadRequest(reasons, param=keys[0]) from None
    return made


def _blame(bound: Bound, problem: Problem, asked: Mapping[str, Any]) -> str:
    """The key of a problem as the client wrote it: `top_p`, or `headrace.logits.top-p.p`."""
    path = problem.where.path[3:]
    if path and path[0] not in asked and (bound.name, path[0]) in _ALIASED:
        return ".".join((_ALIASED[bound.name, path[0]], *path[1:]))
    return problem.where.key


def _check(bound: Bound, params: Struct) -> None:
    check = getattr(bound.component, "check", None)
    if check is None:
        return
    try:
        check(params)
    except BadRequest as error:
        error.param = error.param or _key(bound.name)
        error.plugin = error.plugin or bound.plugin
        raise
    except Exception as error:
        reason = f"the logits processor {bound.name} of plugin {bound.plugin} failed to check its parameters"
        raise RequestFailed(reason, plugin=bound.plugin) from error


def _key(name: str) -> str:
    return f"headrace.logits.{name}"
