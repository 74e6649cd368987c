"""The routes: OpenAI's chat and text completions and models, and what operators ask for: health, readiness, metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import metadata
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
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from ..hooks.errors import BadRequest, NotFound, RequestError, RequestFailed, Unavailable
from .auth import Door
from .errors import error_response
from .extensions import NOTHING, Extensions
from .limits import HeaderLimit
from .middleware import RequestId, WholeBody
from .reload import Reload
from .respond import respond
from .schemas import ChatBody, CommonBody, CompletionBody, decode
from .token_routes import TokenRoutes
from .websocket import WebSockets

if TYPE_CHECKING:
    from ..core.engine import Engine, ModelInfo
    from ..hooks.registry import Bound
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
    auth: Bound | None = None,
    open_routes: Sequence[str] = (),
    extensions: Extensions = NOTHING,
    reload: Reload | None = None,
    max_headers: int = 100,
    max_header_bytes: int = 16 * 1024,
    body_timeout_s: float = BODY_TIMEOUT_S,
) -> Starlette:
    """The ASGI application in front of *engine*, which may still be loading."""
    api = Api(engine, metrics, ping_s=ping_s)
    middleware = [Middleware(RequestId, on_status=metrics.answered)]
    middleware.append(Middleware(HeaderLimit, max_headers=max_headers, max_bytes=max_header_bytes))
    if cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", "server-timing"],
            )
        )
    if auth is not None:
        middleware.append(Middleware(Door, auth=auth, open_routes=open_routes))
    middleware.append(Middleware(WholeBody, max_bytes=max_body_bytes, timeout_s=body_timeout_s))
    middleware += extensions.around()
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            *TokenRoutes(engine, api.serving).routes(),
            Route("/version", api.version),
            WebSocketRoute("/v1/ws", WebSockets(engine, api.serving, origins=cors_origins)),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/metrics", api.metrics),
            *([reload.route()] if reload is not None else []),
            *extensions.mounts(),
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
        self._respond = partial(respond, engine, ping_s=ping_s)

    async def chat(self, http: HTTPRequest) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        body, info = await self._read(http, ChatBody)
        return self._respond(http, info, body, [body.prompt()])

    async def completions(self, http: HTTPRequest) -> ASGIApp:
        """`POST /v1/completions`."""
        body, info = await self._read(http, CompletionBody)
        prompts = body.prompts()
        echoes = await body.echoes(prompts, self._engine)
        return self._respond(http, info, body, prompts, echoes)

    async def models(self, http: HTTPRequest) -> Response:
        """`GET /v1/models`."""
        info = self.serving(None)
        return _json({"object": "list", "data": [_model(info, name) for name in (info.name, *info.aliases)]})

    async def model(self, http: HTTPRequest) -> Response:
        """`GET /v1/models/{name}`."""
        name = http.path_params["name"]
        return _json(_model(self.serving(name), name))

    async def version(self, http: HTTPRequest) -> Response:
        """`GET /version`. The fingerprint is that of the components behind the model, null while it loads."""
        info = self._engine.info
        return _json({"version": _version(), "fingerprint": info.fingerprint if info else None})

    async def health(self, http: HTTPRequest) -> Response:
        """`GET /health`: whether the process works, or will never again. A draining one works."""
        return self._state(healthy=("ready", "draining"))

    async def ready(self, http: HTTPRequest) -> Response:
        """`GET /ready`: whether to send requests here."""
        return self._state(healthy=("ready",))

    async def metrics(self, http: HTTPRequest) -> Response:
        """`GET /metrics`, in Prometheus' text format."""
        statistics = self._engine.statistics() if self._engine.info is not None else None
        text = self._metrics.render(statistics, self._engine.info)
        return Response(text, headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _read(self, http: HTTPRequest, kind: type[Body]) -> tuple[Body, ModelInfo]:
        self.serving(None)
        body = decode(await http.body(), kind)
        info = self.serving(body.model)
        body.refuse_unsupported()
        return body, info

    def serving(self, name: str | None) -> ModelInfo:
        """The model.

        Args:
            name: what the client calls it, if anything.

        Raises:
            NotFound: it has another name.
            Unavailable: it is not ready.
        """
        info, state = self._engine.info, self._engine.state
        if state != "ready" or info is None:
            reason = {"loading": "the model is still loading", "draining": "the server is shutting down"}
            raise Unavailable(reason.get(state, "the engine has died"), retry_after_s=RETRY_LOADING_S)
        if name is not None and name != info.name and name not in info.aliases:
            raise NotFound(f"model {name} does not exist here: use {info.name}", param="model", code="model_not_found")
        return info

    def _state(self, *, healthy: tuple[str, ...]) -> Response:
        state = self._engine.state
        return _json({"status": "ok" if state == "ready" else state}, status=200 if state in healthy else 503)


@cache
def _version() -> str:
    return metadata.version("headrace")


def _model(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
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
