"""What a client asks, checked and settled, before anything of it enters the line."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from ..hooks.decode import convert
from ..hooks.errors import BadRequest
from ..hooks.messages import ChatPrompt, TextPrompt, TokenPrompt
from ..hooks.params import ALIASES, Extension, SamplingParams
from ..hooks.stack import Stack

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")


class _Extended(Struct, frozen=True):
    """So that an error's place begins with the field's name."""

    headrace: Extension


def settle(asked: Mapping[str, object], extra: Mapping[str, Mapping[str, object]]) -> SamplingParams:
    """Check the limits of what is asked, and choose a seed where there is none.

    Args:
        asked: fields of `SamplingParams`, with the server's defaults.
        extra: parameters of logits processors by name; where a word of `SamplingParams` means the same, they win.

    Raises:
        BadRequest: names the parameter at fault.
    """
    words = {**asked, **_aliased(extra)}
    if words.get("seed") is None:
        words["seed"] = secrets.randbits(63)
    try:
        settled: SamplingParams = convert(words, SamplingParams)
    except msgspec.ValidationError as error:
        raise _bad_params(error, words) from error
    return settled


def extension(asked: Mapping[str, object]) -> Extension:
    """What a request's field `headrace` holds.

    Raises:
        BadRequest: names the field of it at fault.
    """
    try:
        found: _Extended = convert({"headrace": dict(asked)}, _Extended)
    except msgspec.ValidationError as error:
        raise _bad_params(error, {}) from error
    return found.headrace


def check_ids(prompt: ChatPrompt | TextPrompt | TokenPrompt, params: SamplingParams, vocab_size: int) -> None:
    """Token ids index the embedding and the logits: one that lies outside must not get there."""
    ids = prompt.token_ids if isinstance(prompt, TokenPrompt) else ()
    for name, values in (("prompt", ids), ("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for value in values:
            if not 0 <= value < vocab_size:
                raise BadRequest(f"{name}: token ids must be >= 0 and < {vocab_size}, got {value}", param=name)


def all_in_use(stack: Stack, chain: Sequence[Struct | None], claim: str, *, default: bool) -> bool:
    """Whether the sampler and all processors that a request uses make *claim* (see `protocols.LogitsProcessor`)."""
    used = [bound for bound, params in zip(stack.processors, chain, strict=True) if params is not None]
    return all(getattr(bound.component, claim, default) for bound in (*used, stack.sampler))


def _aliased(extra: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """What *extra* says in the words of processors, in the words of `SamplingParams` where there are such."""
    return {alias: extra[name][field] for alias, (name, field) in ALIASES.items() if field in extra.get(name, {})}


def _bad_params(error: msgspec.ValidationError, asked: Mapping[str, object]) -> BadRequest:
    message = str(error)
    place = _PLACE.search(message)
    param = place["path"].replace("[...]", "") if place else ""
    reason = message[: place.start()] if place else message
    shown = repr(asked[param]) if param in asked and ", got" not in reason else ""
    found = f", got {shown[:80]}" if shown else ""
    return BadRequest(f"{param or 'parameters'}: {reason[0].lower()}{reason[1:]}{found}", param=param or None)
