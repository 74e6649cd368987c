"""The bodies of `/v1/chat/completions` and `/v1/completions`; what they share is in `common_body`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from msgspec import Meta

from ..hooks.errors import BadRequest
from ..hooks.messages import ChatPrompt, TextPrompt, TokenPrompt
from ..hooks.params import Extension
from .common_body import INT64_MAX, CommonBody, Sampling, decode
from .conversation import Message

if TYPE_CHECKING:
    from ..core.engine import Engine

__all__ = ["ChatBody", "CommonBody", "CompletionBody", "Extension", "Sampling", "decode"]

MAX_PROMPTS: Final = 64
MAX_LOGPROBS: Final = 5
"""Of `/v1/completions`, as OpenAI has it."""


Messages = Annotated[list[Message], Meta(min_length=1)]


class ChatBody(CommonBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompt(self) -> ChatPrompt:
        """The conversation as templates see it.

        Raises:
            BadRequest: two of the fields exclude each other.
        """
        return conversation(
            self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs,
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

    def prompts(self) -> list[TextPrompt | TokenPrompt]:
        """Each prompt; a list of numbers is one.

        Raises:
            BadRequest: there is none, or too many, or one is empty.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [self._text(prompt)]
        if not prompt:
            raise BadRequest("prompt: must hold at least one token id or one prompt, got none", param="prompt")
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise BadRequest("prompt: must be all texts, all token ids, or all lists of token ids", param="prompt")
        if kinds == {int}:
            return [_ids(cast("list[int]", prompt), "prompt")]
        if len(prompt) > MAX_PROMPTS:
            raise BadRequest(
                f"prompt: must be at most {MAX_PROMPTS} prompts, got {len(prompt)}: send several requests",
                param="prompt",
            )
        return [
            self._text(item) if isinstance(item, str) else _ids(cast("list[int]", item), f"prompt[{place}]")
            for place, item in enumerate(prompt)
        ]

    def text_or_ids(self) -> TextPrompt | TokenPrompt:
        """The one prompt, for a route that answers just one and does not repeat it.

        Raises:
            BadRequest: there are several, or the prompt is to be repeated.
        """
        first, *others = self.prompts()
        if others:
            raise BadRequest(
                f"prompt: must be one prompt, got {1 + len(others)}: send one request for each", param="prompt"
            )
        if self.echo:
            raise BadRequest("echo is not supported here", param="echo", code="unsupported_parameter")
        return first

    def params(self) -> dict[str, object]:
        params = super().params()
        if self.logprobs is not None:
            if self.logprobs > MAX_LOGPROBS:
                raise BadRequest(f"logprobs: must be <= {MAX_LOGPROBS}, got {self.logprobs}", param="logprobs")
            params["logprobs"] = self.logprobs
            if self.echo:
                if self.prompt_logprobs not in (None, self.logprobs):
                    raise BadRequest(
                        f"prompt_logprobs: must equal logprobs ({self.logprobs}) where echo repeats the prompt, got "
                        f"{self.prompt_logprobs}: leave it out",
                        param="prompt_logprobs",
                    )
                params["prompt_logprobs"] = self.logprobs
        return params

    def unsupported(self) -> Iterator[str]:
        yield from super().unsupported()
        if self.suffix:
            yield "suffix"
        if self.best_of is not None and self.best_of != (self.n or 1):
            yield "best_of"

    async def echoes(self, prompts: Sequence[TextPrompt | TokenPrompt], engine: Engine) -> list[str | None]:
        """What stands before the answer to each of *prompts*; None where nothing does.

        Raises:
            BadRequest: a token id that the model has not.
        """
        if not self.echo:
            return [None] * len(prompts)
        return [
            prompt.text
            if isinstance(prompt, TextPrompt)
            else await engine.codec.decode(prompt.token_ids, param="prompt")
            for prompt in prompts
        ]

    def _text(self, text: str) -> TextPrompt:
        return TextPrompt(text=text, parse_special=self.parse_special is not False)


def _ids(ids: list[int], param: str) -> TokenPrompt:
    if not ids:
        raise BadRequest(f"{param}: must hold at least one token id", param=param)
    return TokenPrompt(token_ids=tuple(ids))


def conversation(
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
) -> ChatPrompt:
    """A conversation as templates see it; None is the default.

    Raises:
        BadRequest: two of the fields exclude each other.
    """
    if continue_final_message and add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other: set one of them",
            param="continue_final_message",
        )
    going_on = bool(continue_final_message)
    return ChatPrompt(
        messages=tuple(message.rendered() for message in messages),
        tools=tuple(tools or ()),
        add_generation_prompt=not going_on and add_generation_prompt is not False,
        continue_final_message=going_on,
        template_kwargs=template_kwargs or {},
    )
