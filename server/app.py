"""The routes: OpenAI's chat and text completions and models, and what operators ask for: health, readiness, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import prometheus_client
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..hooks.errors import BadRequest, NotFound, RequestError, RequestFailed, Unavailable
from ..hooks.messages import ChatPrompt, TextPrompt, TokenPrompt
from .answers import ChatFormat, CompletionFormat, Format
from .errors import error_response
from .exchange import WholeAnswer
from .middleware import RequestId, WholeBody
from .schemas import ChatBody, CommonBody, CompletionBody, Extension, decode
from .sse import TokenStream

if TYPE_CHECKING:
    from ..core.engine import Engine, ModelInfo
    from .metrics import Metrics

BODY_TIMEOUT_S: Final = 30.0
RETRY_LOADING_S: Final = 5.0

Body = TypeVar("Body", bound=CommonBody)

log = structlog.get_logger()


def create_app(
    engine: Engine,
    metrics: Metrics,
    *,
    max_body_bytes: int,
    ping_s: float,
    cors_origins: Sequence[str] = (),
    body_timeout_s: float = BODY_TIMEOUT_S,
) -> Starlette:
    """The ASGI application in front of *engine*, which may still be loading."""
    api = Api(engine, metrics, ping_s=ping_s)
    middleware = [Middleware(RequestId)]
    if cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    middleware.append(Middleware(WholeBody, max_bytes=max_body_bytes, timeout_s=body_timeout_s))
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/metrics", api.metrics),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, RequestError: _request_error, Exception: _unforeseen},
    )
    app.router.redirect_slashes = False
    return app


class Api:
    """The routes' functions. Each either gives an ASGI application that answers, or raises RequestError."""

    def __init__(self, engine: Engine, metrics: Metrics, *, ping_s: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._ping_s = ping_s

    async def chat(self, http: HTTPRequest) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        body, info = await self._read(http, ChatBody)
        return self._answer(http, info, body, body.prompt(), ChatFormat)

    async def completions(self, http: HTTPRequest) -> ASGIApp:
        """`POST /v1/completions`."""
        body, info = await self._read(http, CompletionBody)
        return self._answer(http, info, body, body.text_or_ids(), CompletionFormat)

    async def models(self, http: HTTPRequest) -> Response:
        """`GET /v1/models`."""
        return _json({"object": "list", "data": [_model(self._ready_info())]})

    async def model(self, http: HTTPRequest) -> Response:
        """`GET /v1/models/{name}`."""
        info = self._ready_info()
        _check_model(http.path_params["name"], info)
        return _json(_model(info))

    async def health(self, http: HTTPRequest) -> Response:
        """`GET /health`: whether the process works, or will never again. A draining one works."""
        return self._state(healthy=("ready", "draining"))

    async def ready(self, http: HTTPRequest) -> Response:
        """`GET /ready`: whether to send requests here."""
        return self._state(healthy=("ready",))

    async def metrics(self, http: HTTPRequest) -> Response:
        """`GET /metrics`, in Prometheus' text format."""
        statistics = self._engine.statistics() if self._engine.info is not None else None
        text = self._metrics.render(statistics)
        return Response(text, headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _read(self, http: HTTPRequest, kind: type[Body]) -> tuple[Body, ModelInfo]:
        info = self._ready_info()
        body = decode(await http.body(), kind)
        if body.model is not None:
            _check_model(body.model, info)
        body.refuse_unsupported()
        return body, info

    def _ready_info(self) -> ModelInfo:
        info, state = self._engine.info, self._engine.state
        if state != "ready" or info is None:
            reason = {"loading": "the model is still loading", "draining": "the server is shutting down"}
            raise Unavailable(reason.get(state, "the engine has died"), retry_after_s=RETRY_LOADING_S)
        return info

    def _answer(
        self,
        http: HTTPRequest,
        info: ModelInfo,
        body: ChatBody | CompletionBody,
        prompt: ChatPrompt | TextPrompt | TokenPrompt,
        kind: type[Format],
    ) -> ASGIApp:
        params = body.params()
        id = kind.id_prefix + http.scope["request_id"]
        extension = body.headrace or Extension()
        start = partial(
            self._engine.request,
            prompt,
            params,
            id=id,
            extra=extension.logits,
            priority=extension.priority,
            timeout_s=extension.timeout_s,
        )
        format = kind(
            id=id,
            created=int(time.time()),
            model=info.name,
            fingerprint=info.fingerprint,
            token_text=self._engine.token_text,
            logprobs="logprobs" in params,
            include_usage=body.include_usage,
        )
        if body.stream:
            return TokenStream(self._engine, start, format, ping_s=self._ping_s)
        return WholeAnswer(self._engine, start, format)

    def _state(self, *, healthy: tuple[str, ...]) -> Response:
        state = self._engine.state
        return _json({"status": "ok" if state == "ready" else state}, status=200 if state in healthy else 503)


def _check_model(name: str, info: ModelInfo) -> None:
    if name != info.name:
        raise NotFound(f"model {name} does not exist here: use {info.name}", param="model", code="model_not_found")


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "headrace",
        "max_model_len": info.max_model_len,
    }


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


async def _request_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _http_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds: dict[int, Callable[[str], RequestError]] = {404: NotFound, 405: BadRequest}
    where = f"{http.method} {http.url.path}: {error.detail}"
    response = error_response(kinds.get(error.status_code, BadRequest)(where))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _unforeseen(http: HTTPRequest, error: Exception) -> Response:
    return error_response(RequestFailed("something unforeseen went wrong here; the server's log has it"))
