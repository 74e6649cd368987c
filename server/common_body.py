"""What the bodies of both kinds of completions share: OpenAI's fields, and those usual for local models.

Types are checked here and nothing is converted; limits belong to `SamplingParams` and are checked by the engine.
Unknown fields are ignored, for clients send ever new ones, and null means the default.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
import structlog
from msgspec import Struct

from ..hooks.errors import BadRequest
from ..hooks.params import Extension
from .answers import Wanted
from .errors import bad_body

Body = TypeVar("Body", bound=Struct)

INT64_MAX: Final = 2**63 - 1

# Constraints on the answer as other servers spell them. Ignored, they would yield answers that break a caller's trust.
_CONSTRAINTS: Final = (
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)

log = structlog.get_logger()


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str


class Sampling(Struct, kw_only=True):
    """The fields of `SamplingParams` that have the same name in a body."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    def params(self) -> dict[str, object]:
        """Those that were given, as `Engine.request` takes them."""
        given = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        params = {name: value for name, value in given.items() if value is not None}
        if isinstance(self.stop, str):
            params["stop"] = [self.stop]
        if self.max_tokens is not None:
            # Whatever is beyond the context is capped to it later, however large.
            params["max_tokens"] = min(self.max_tokens, INT64_MAX)
        return params


class CommonBody(Sampling, kw_only=True):
    """What both kinds of completions have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    headrace: Extension | None = None
    grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    def wanted(self, params: Mapping[str, object]) -> Wanted:
        """What the client wants to see. *params*: what `params` gave."""
        options = self.stream_options or StreamOptions()
        return Wanted(
            logprobs="logprobs" in params,
            prompt_logprobs=self.prompt_logprobs is not None,
            token_ids=bool(self.return_token_ids),
            usage=bool(options.include_usage),
            running_usage=bool(options.include_usage and options.continuous_usage_stats),
        )

    def refuse_unsupported(self) -> None:
        """Raises:
        BadRequest: the body asks for something that cannot be given and must not be ignored.
        """
        for name in self.unsupported():
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest(
                "prompt_logprobs come with a whole answer only: set stream to false", param="prompt_logprobs"
            )
        if self.response_format is not None:
            _require_text(self.response_format.type)

    def unsupported(self) -> Iterator[str]:
        """Fields that are set and cannot be obeyed."""
        yield from (name for name in _CONSTRAINTS if getattr(self, name))


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Read a body.

    Raises:
        BadRequest: it is no JSON, or a field has the wrong type; `param` names the field.
    """
    try:
        body = msgspec.json.decode(raw, type=kind)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise bad_body(error) from None
    if log.is_enabled_for(logging.DEBUG):
        unknown = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys() - set(kind.__struct_fields__)
        if unknown:
            log.debug("fields ignored", fields=sorted(unknown))
    return body


def _require_text(kind: str) -> None:
    if kind == "text":
        return
    if kind in ("json_object", "json_schema"):
        reason = f"{kind} is not supported, for no grammar plugin is configured"
    else:
        reason = f"must be text, json_object or json_schema, got {kind}"
    raise BadRequest(f"response_format.type: {reason}", param="response_format.type", code="unsupported_parameter")
