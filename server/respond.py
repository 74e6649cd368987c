"""From a body to what answers it: the engine's requests, the format of their answer, the application that writes it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp

from ..hooks.messages import ChatPrompt, TextPrompt, TokenPrompt
from .answers import Format, Tally
from .chat_format import ChatFormat
from .completion_format import CompletionFormat
from .exchange import Start, WholeAnswer
from .limits import timeout_s
from .schemas import ChatBody, CommonBody, CompletionBody, Extension
from .several import SeveralAnswers, SeveralStreams
from .sse import TokenStream

if TYPE_CHECKING:
    from ..core.engine import Engine, ModelInfo

Prompt = ChatPrompt | TextPrompt | TokenPrompt


def respond(
    engine: Engine,
    http: HTTPRequest,
    info: ModelInfo,
    body: ChatBody | CompletionBody,
    prompts: Sequence[Prompt],
    echoes: Sequence[str | None] = (None,),
    *,
    ping_s: float,
) -> ASGIApp:
    """What answers *prompts*.

    Args:
        echoes: what stands before each answer, on the route that has it.
        ping_s: see `TokenStream`.
    """
    params = body.params()
    kind = ChatFormat if isinstance(body, ChatBody) else CompletionFormat
    id = kind.id_prefix + http.scope["request_id"]
    common = {
        "id": id,
        "created": int(time.time()),
        "model": info.name,
        "fingerprint": info.fingerprint,
        "token_text": engine.token_text,
        "wanted": body.wanted(params),
        "tally": Tally(),
    }
    if len(prompts) == 1:
        start = starting(engine, http, body, prompts[0], params, id)
        format = make_format(kind, echoes[0], common)
        if body.stream:
            return TokenStream(engine, start, format, ping_s=ping_s)
        return WholeAnswer(engine, start, format)
    starts = [starting(engine, http, body, prompt, params, f"{id}-{place}") for place, prompt in enumerate(prompts)]
    formats = [make_format(kind, echo, {**common, "place": place}) for place, echo in enumerate(echoes)]
    if body.stream:
        return SeveralStreams(engine, starts, formats, ping_s=ping_s)
    return SeveralAnswers(engine, starts, formats)


def make_format(kind: type[Format], echo: str | None, common: Mapping[str, Any]) -> Format:
    return CompletionFormat(echo=echo, **common) if kind is CompletionFormat else kind(**common)


def starting(
    engine: Engine, http: HTTPRequest, body: CommonBody, prompt: Prompt, params: Mapping[str, object], id: str
) -> Start:
    """Makes the engine's request when it is called."""
    extension = body.headrace or Extension()
    return partial(
        engine.request,
        prompt,
        params,
        id=id,
        extra=extension.logits,
        sampler=extension.sampler,
        stop=extension.stop,
        priority=extension.priority,
        timeout_s=timeout_s(http.headers, extension.allowed_s),
        patience_s=extension.patience_s,
        tenant=http.scope.get("tenant", ""),
    )
