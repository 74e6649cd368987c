"""The bodies of `/v1/chat/completions` and `/v1/completions`: OpenAI's fields, and those usual for local models.

Types are checked here and nothing is converted; limits belong to `SamplingParams` and are checked by the engine.
Unknown fields are ignored, for clients send ever new ones, and null means the default.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeVar

import msgspec
import structlog
from msgspec import Meta, Struct, field

from ..hooks.errors import BadRequest
from ..hooks.messages import ChatPrompt, TextPrompt, TokenPrompt
from .conversation import Message
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


class ResponseFormat(Struct, frozen=True):
    type: str


class Extension(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Field `headrace`: what OpenAI's API has no word for. *logits*: logits processor → its parameters."""

    logits: dict[str, dict[str, Any]] = field(default_factory=dict)
    priority: int = 0
    timeout_s: Annotated[float, Meta(gt=0)] | None = None


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

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Raises:
        BadRequest: the body asks for something that cannot be given and must not be ignored.
        """
        for name in self.unsupported():
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
        if self.response_format is not None:
            _require_text(self.response_format.type)

    def unsupported(self) -> Iterator[str]:
        """Fields that are set and cannot be obeyed."""
        yield from (name for name in _CONSTRAINTS if getattr(self, name))


class ChatBody(CommonBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompt(self) -> ChatPrompt:
        """The conversation as templates see it."""
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other: set one of them",
                param="continue_final_message",
            )
        going_on = bool(self.continue_final_message)
        return ChatPrompt(
            messages=tuple(message.rendered() for message in self.messages),
            tools=tuple(self.tools or ()),
            add_generation_prompt=not going_on and self.add_generation_prompt is not False,
            continue_final_message=going_on,
            template_kwargs=self.chat_template_kwargs or {},
        )

    def params(self) -> dict[str, object]:
        params = super().params()
        if self.max_completion_tokens is not None:
            params["max_tokens"] = min(self.max_completion_tokens, INT64_MAX)
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return params

    def unsupported(self) -> Iterator[str]:
        yield from super().unsupported()
        if self.functions:
            yield "functions"


class CompletionBody(CommonBody, kw_only=True):
    """`POST /v1/completions`."""

    # One type of array only can stand in a union, so its elements are sorted out below.
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    parse_special: bool | None = None

    def text_or_ids(self) -> TextPrompt | TokenPrompt:
        """The one prompt."""
        prompt = self.prompt
        if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
            if len(prompt) > 1:
                raise BadRequest(
                    f"prompt: must be one prompt, got {len(prompt)}: send one request for each", param="prompt"
                )
            (prompt,) = prompt  # type: ignore[assignment]
        if isinstance(prompt, str):
            return TextPrompt(text=prompt, parse_special=self.parse_special is not False)
        if not prompt:
            raise BadRequest("prompt: must hold at least one token id", param="prompt")
        return TokenPrompt(token_ids=tuple(prompt))  # type: ignore[arg-type]

    def params(self) -> dict[str, object]:
        params = super().params()
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
        return params

    def unsupported(self) -> Iterator[str]:
        yield from super().unsupported()
        if self.echo:
            yield "echo"
        if self.suffix:
            yield "suffix"
        if self.best_of is not None and self.best_of != (self.n or 1):
            yield "best_of"


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
