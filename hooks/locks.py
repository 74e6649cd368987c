"""What the operator has locked: fields that no request may set.

A lock is a word of `SamplingParams`, `logits.NAME` or `logits.NAME.FIELD` for a logits processor, `stop.NAME` or
`stop.NAME.FIELD` for a stop watcher, `sampler` or `sampler.FIELD` for the sampler. Where a word and a field are the
same thing (`top_p` is `logits.top-p.p`), locking either locks both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from .decode import Problem, did_you_mean
from .errors import BadRequest
from .origins import Where
from .params import ALIASES, SamplingParams

Path = tuple[str, ...]
Params = Mapping[str, type[Struct] | None]
_CHAINS: Final = {"logits": "logits processor", "stop": "stop watcher"}


def unknown_words(locked: Sequence[str], where: Where) -> Iterator[Problem]:
    """The locks that no request could ever run into, as far as can be told without looking at plugins."""
    words = SamplingParams.__struct_fields__
    for index, lock in enumerate(locked):
        section, *rest = lock.split(".")
        if lock in words:
            continue
        if section in _CHAINS:
            if len(rest) not in (1, 2) or not all(rest):
                yield Problem(where / index, f"must be {section}.NAME or {section}.NAME.FIELD, got {lock}")
        elif section == "sampler":
            if len(rest) > 1 or not all(rest):
                yield Problem(where / index, f"must be sampler or sampler.FIELD, got {lock}")
        else:
            known = (*words, *_CHAINS, "sampler")
            yield Problem(where / index, f"no parameter called {lock!r}{did_you_mean(lock, known)}")


def unknown_fields(
    locked: Sequence[str], chains: Mapping[str, Params], sampler: type[Struct] | None, where: Where
) -> Iterator[Problem]:
    """The locks of components that are not in use, and of fields that nothing has.

    Args:
        chains: `logits` and `stop`, each name → per-request parameters, of all that are in use.
        sampler: the sampler's per-request parameters.
    """
    for index, lock in enumerate(locked):
        section, *rest = lock.split(".")
        if section in chains and rest:
            names, (name, *fields) = chains[section], rest
            if name not in names:
                reason = f"no {_CHAINS[section]} called {name!r} is enabled{did_you_mean(name, names)}"
                yield Problem(where / index, reason)
                continue
            params = names[name]
        elif section == "sampler":
            name, fields, params = "sampler", rest, sampler
        else:
            continue
        known = () if params is None else params.__struct_fields__
        for field in fields:
            if field not in known:
                listed = ", ".join(known) or "none"
                yield Problem(where / index, f"{name} has no {field!r}{did_you_mean(field, known)} (fields: {listed})")


def refuse_locked(
    locked: Sequence[str],
    params: Mapping[str, object],
    extra: Mapping[str, Mapping[str, object]],
    sampler: Mapping[str, object] | None = None,
    stop: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Let a request pass that sets nothing the operator has locked.

    Args:
        params: the words of `SamplingParams` it sets itself, without the server's defaults.
        extra: processor → the fields it sets.
        sampler: the fields of the sampler it sets.
        stop: stop watcher → the fields it sets.

    Raises:
        BadRequest: names the first one it sets.
    """
    if not locked:
        return
    locks = {_path(lock): lock for lock in locked}
    chains = {"logits": extra, "stop": stop or {}}
    for path, key in _asked(params, chains, sampler or {}):
        lock = next((locks[path[:n]] for n in range(1, len(path) + 1) if path[:n] in locks), None)
        if lock is not None:
            raise BadRequest(f"{key} is fixed by the operator of this server; leave it out", param=key, code="locked")


def _path(lock: str) -> Path:
    name, field = ALIASES.get(lock, ("", ""))
    if name:
        return ("logits", name, field)
    # `stop` is a word of its own, and not all stop watchers.
    return ("word", lock) if lock in SamplingParams.__struct_fields__ else tuple(lock.split("."))


def _asked(
    params: Mapping[str, object],
    chains: Mapping[str, Mapping[str, Mapping[str, object]]],
    sampler: Mapping[str, object],
) -> Iterator[tuple[Path, str]]:
    """(what is set, the key as the client wrote it)."""
    yield from ((_path(word), word) for word in params)
    for section, asked in chains.items():
        for name, fields in asked.items():
            # Naming a component is asking for something, even without a field.
            paths = [(section, name), *((section, name, field) for field in _fields(fields))]
            yield from ((path, "headrace." + ".".join(path)) for path in paths)
    yield from ((("sampler", field), f"headrace.sampler.{field}") for field in sampler)


def _fields(asked: object) -> tuple[str, ...]:
    """Its keys; whoever resolves it will say that it must be a table."""
    return tuple(asked) if isinstance(asked, Mapping) else ()
