"""Who may ask for what: one rule over every route, WebSockets and unknown paths included.

The auth component (slot `auth`) says who asks; the path says which scope that takes. Whatever goes wrong, the answer is
no. Knows nothing of keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import structlog
import trio
from starlette.types import ASGIApp, Receive, Scope, Send

from ..hooks.config import Use
from ..hooks.errors import ConfigError, RequestError, Unavailable
from ..hooks.protocols import Auth, Context
from ..hooks.registry import Bound, Registry
from .errors import error_response
from .limits import drain

if TYPE_CHECKING:
    from ..hooks.config import Loaded

KEYS_VARIABLE: Final = "HEADRACE_API_KEY"
IDENTIFY_S: Final = 10.0

DEFAULT_SCOPES: Final = frozenset({"infer", "models", "metrics"})
"""Of a tenant whose auth component has no `scopes(tenant)`: all but admin."""

SCOPES: Final = (
    ("/health", None),
    ("/ready", None),
    ("/version", None),
    ("/metrics", "metrics"),
    ("/v1/models", "models"),
    ("/debug", "admin"),
    ("/admin", "admin"),
)
"""Paths, those below them included, and the scope they take; None: any key will do. All others take `infer`."""

log = structlog.get_logger()


class Unauthorized(RequestError):
    """Nobody we know."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """Somebody we know, who may not."""

    status = 403
    kind = "permission_error"
    code = "insufficient_scope"


class Door:
    """ASGI middleware that lets in whom *auth* knows; routes find who it is in the scope, as `tenant`.

    Args:
        auth: the chosen component.
        open_routes: paths that need no key.
    """

    def __init__(self, app: ASGIApp, *, auth: Bound, open_routes: Collection[str] = ()) -> None:
        self._app = app
        self._auth: Auth = auth.component
        self._name = f"{auth.plugin}/{auth.name}"
        self._scopes_of: Callable[[str], Collection[str]] = getattr(
            auth.component, "scopes", lambda tenant: DEFAULT_SCOPES
        )
        self._open_routes = frozenset(open_routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_routes:
            return await self._app(scope, receive, send)
        try:
            scope["tenant"] = await self._admit(scope)
        except RequestError as error:
            return await refuse(error, scope, receive, send)
        return await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> str:
        tenant, scopes = await self._identify(scope)
        if tenant is None:
            raise Unauthorized("a known API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        wanted = scope_for(scope["path"])
        if wanted is not None and wanted not in scopes:
            raise Forbidden(f"this needs the scope {wanted}, which the key of {tenant} lacks")
        return tenant

    async def _identify(self, scope: Scope) -> tuple[str | None, Collection[str]]:
        try:
            with trio.fail_after(IDENTIFY_S):
                tenant = await self._auth.identify(joined(scope["headers"]))
            if tenant is not None and not isinstance(tenant, str):
                raise TypeError(f"identify must return a str or None, got {type(tenant).__name__}")
            return tenant, () if tenant is None else self._scopes_of(tenant)
        except Exception as error:
            # No traceback: its lines may hold what the headers hold.
            log.error("auth failed; the request is refused", auth=self._name, error=type(error).__name__)  # noqa: TRY400
            raise Unavailable("who you are cannot be checked now; try again later", retry_after_s=5) from None


def scope_for(path: str) -> str | None:
    """The scope that *path* takes; None: any."""
    for prefix, scope in SCOPES:
        if path == prefix or path.startswith(f"{prefix}/"):
            return scope
    return "infer"


def joined(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Header fields by name. A repeated one is one list, so that a second key neither hides nor replaces the first."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        name = name.lower()
        found[name] = found[name] + b", " + value if name in found else value
    return found


async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer *error*, before a WebSocket is accepted too."""
    response = error_response(error)
    if error.status == 401:
        response.headers["www-authenticate"] = 'Bearer realm="headrace"'
    await drain(receive)
    await response(scope, receive, send)


def build_auth(loaded: Loaded, keys: Sequence[str] = ()) -> Bound | None:
    """What the configuration chose; None: everybody is let in.

    Args:
        keys: from the command line; they take the place of a configured component.

    Raises:
        StartError: it cannot be used, or both are given.
    """
    use, where = loaded.settings.server.auth, loaded.where("server.auth")
    if keys:
        if use.use != "none":
            raise ConfigError(f"{where}: --api-key and server.auth say the same thing; set one of them")
        # Handed over as keys always are, so that they stand in no setting that could be shown.
        os.environ[KEYS_VARIABLE] = " ".join(keys)
        use = Use(use="static-keys", options={"keys": [{"name": "default", "key": {"env": KEYS_VARIABLE}}]})
    if use.use == "none":
        return None
    plugins = loaded.settings.plugins
    registry = Registry.discover(
        disable=plugins.disable, allow=plugins.allow, strict=plugins.strict, where=loaded.where("plugins")
    )
    return registry.build("auth", use, Context(), where)
