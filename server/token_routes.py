"""`/tokenize`, `/detokenize` and `/apply-template`: what a prompt is to the model, without asking it anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from ..hooks.errors import BadRequest
from ..hooks.messages import ChatPrompt, TextPrompt
from .schemas import Messages, conversation, decode

if TYPE_CHECKING:
    from ..core.engine import Engine, ModelInfo


class TemplateBody(Struct, kw_only=True):
    """`POST /apply-template`."""

    model: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> ChatPrompt:
        """Raises:
        BadRequest: there is none, or two of the fields exclude each other.
        """
        if self.messages is None:
            raise BadRequest("messages: required, and missing", param="messages")
        return conversation(
            self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs,
        )


class TokenizeBody(TemplateBody, kw_only=True):
    """`POST /tokenize`: a text or a conversation."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None

    def source(self) -> ChatPrompt | TextPrompt:
        """Raises:
        BadRequest: there is not just one of the two.
        """
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("prompt: give either prompt or messages", param="prompt")
        if self.prompt is None:
            return self.conversation()
        return TextPrompt(text=self.prompt, parse_special=self.parse_special is not False)


class DetokenizeBody(Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=TemplateBody | DetokenizeBody)
Serving = Callable[[str | None], "ModelInfo"]
"""Gives the model that a request may name. Raises NotFound, Unavailable."""


class TokenRoutes:
    """The routes' functions.

    Args:
        serving: checks the name of the model.
    """

    def __init__(self, engine: Engine, serving: Serving) -> None:
        self._engine = engine
        self._serving = serving

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/apply-template", self.apply_template, methods=["POST"]),
        ]

    async def tokenize(self, http: HTTPRequest) -> Response:
        """`POST /tokenize`."""
        body, info = await self._read(http, TokenizeBody)
        codec = self._engine.codec
        ids = await codec.encode(body.source(), add_special=body.add_special_tokens is not False)
        strings = await codec.strings(ids) if body.return_token_strs else None
        return _json(
            {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids.tolist(), "token_strs": strings}
        )

    async def detokenize(self, http: HTTPRequest) -> Response:
        """`POST /detokenize`."""
        body, _ = await self._read(http, DetokenizeBody)
        return _json({"prompt": await self._engine.codec.decode(body.tokens)})

    async def apply_template(self, http: HTTPRequest) -> Response:
        """`POST /apply-template`."""
        body, _ = await self._read(http, TemplateBody)
        return _json({"prompt": await self._engine.codec.render(body.conversation())})

    async def _read(self, http: HTTPRequest, kind: type[Body]) -> tuple[Body, ModelInfo]:
        self._serving(None)
        body = decode(await http.body(), kind)
        return body, self._serving(body.model)


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
