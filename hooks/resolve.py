"""What one request asks of one component, over what the operator says and over the component's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from .components import Bound
from .decode import Problem, convert, decode
from .errors import BadRequest, RequestFailed
from .origins import Where
from .params import ALIASES

Key = tuple[str, ...]
"""Where a client writes the parameters, such as `headrace.logits.top-a`."""

ALIASED: Final = {target: alias for alias, target in ALIASES.items()}


class NoParams(Struct, frozen=True, forbid_unknown_fields=True):
    """What a component without parameters is given: it is in use, for every request."""


def operators(bound: Bound) -> Struct | None:
    """The operator's options, where they are of the same type as the parameters of a request."""
    return bound.options if bound.params is not None and type(bound.options) is bound.params else None


def resolve_params(kind: str, bound: Bound, key: Key, asked: object, words: Mapping[str, Any] | None = None) -> Struct:
    """The parameters of one component: *asked* over *words* over the operator's over the component's own.

    Args:
        kind: what it is, for people: `sampler`.
        asked: fields by name, as the client wrote them under *key*; None: nothing.
        words: fields that words of `SamplingParams` stand for.

    Raises:
        BadRequest: a field that there is not, or a value out of its range.
        RequestFailed: the component failed while it looked at them.
    """
    if asked is not None and not isinstance(asked, Mapping):
        name = ".".join(key)
        raise BadRequest(f"{name}: must be an object, got {asked!r}", param=name)
    operator = operators(bound)
    fields = asked or {}
    values = {**(msgspec.to_builtins(operator) if operator else {}), **(words or {}), **fields}
    resolved = _decode(bound, key, values, fields)
    _check(kind, bound, key, resolved)
    return resolved


def _decode(bound: Bound, key: Key, values: Mapping[str, Any], asked: Mapping[str, Any]) -> Struct:
    kind = bound.params or NoParams
    try:
        made: Struct = convert(values, kind)
    except msgspec.ValidationError:
        problems: list[Problem] = []
        decode(values, kind, Where(key), problems)
        keys = [_blame(bound, len(key), problem, asked) for problem in problems]
        reasons = "; ".join(f"{key}: {problem.reason}" for key, problem in zip(keys, problems, strict=True))
        raise BadRequest(reasons, param=keys[0]) from None
    return made


def _blame(bound: Bound, depth: int, problem: Problem, asked: Mapping[str, Any]) -> str:
    """The key of a problem as the client wrote it: `top_p`, or `headrace.logits.top-p.p`."""
    path = problem.where.path[depth:]
    if path and path[0] not in asked and (bound.name, path[0]) in ALIASED:
        return ".".join((ALIASED[bound.name, path[0]], *path[1:]))
    return problem.where.key


def _check(kind: str, bound: Bound, key: Key, params: Struct) -> None:
    check = getattr(bound.component, "check", None)
    if check is None:
        return
    try:
        check(params)
    except BadRequest as error:
        error.param = error.param or ".".join(key)
        error.plugin = error.plugin or bound.plugin
        raise
    except Exception as error:
        reason = f"the {kind} {bound.name} of plugin {bound.plugin} failed to check its parameters"
        raise RequestFailed(reason, plugin=bound.plugin) from error
