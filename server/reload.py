"""Reads the configuration anew and has the engine serve by it: the route, SIGHUP, and the command that asks for it.

What a configuration can change while the engine serves, and what needs a restart, is the engine's to know.
"""

from __future__ import annotations

import http.client
import importlib
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog
import trio
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from ..hooks import config
from ..hooks.config import Loaded, Sources
from ..hooks.errors import HeadraceError, RequestError, StartError
from .auth import KEYS_VARIABLE, Forbidden
from .errors import error_object
from .options import CONFIG_FILE

if TYPE_CHECKING:
    from ..core.engine import Engine, Reloaded

PATH: Final = "/admin/plugins/reload"
TIMEOUT_S: Final = 300.0

log = structlog.get_logger()


class ReloadFailed(RequestError):
    """The new stack cannot be built."""

    status = 422
    kind = "invalid_request_error"
    code = "reload_failed"


class Configuration:
    """Where settings are read from, as often as it takes.

    Attributes:
        loaded: as it was read first.

    Raises:
        ConfigError: lists every problem.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.loaded = self.read()

    def read(self) -> Loaded:
        """Raises:
        ConfigError: lists every problem.
        """
        sources = self._sources
        if sources.file is None and CONFIG_FILE.exists():
            sources = msgspec.structs.replace(sources, file=CONFIG_FILE)
        importlib.invalidate_caches()  # Profiles may have been installed.
        return config.checked(config.merged(sources))


class Reload:
    """Has *engine* serve by what *read* gives now."""

    def __init__(self, engine: Engine, read: Callable[[], Loaded]) -> None:
        self._engine = engine
        self._read = read

    async def __call__(self) -> Reloaded:
        """Raises:
        StartError: all that is in the way; nothing has changed.
        RequestError: not now.
        """
        loaded = await trio.to_thread.run_sync(self._read)
        return await self._engine.reload(loaded.settings, where=loaded.where)

    def route(self) -> Route:
        """`POST /admin/plugins/reload`, for those whom `server.auth` has let in."""

        async def reload(http: HTTPRequest) -> Response:
            # Without a name nobody may, not even from this machine: a browser or a proxy here asks for others.
            if "tenant" not in http.scope:
                raise Forbidden(
                    "whoever reloads must show a key with the scope admin, and none was asked for here: "
                    "set server.auth, or send the process SIGHUP"
                )
            try:
                content: object = await self()
            except StartError as error:
                failed = ReloadFailed(str(error))
                told = {**error_object(failed)["error"], "reasons": str(error).splitlines()}
                return _json({"error": told}, failed.status)
            return _json(content, 200)

        return Route(PATH, reload, methods=["POST"])

    async def on_hangup(self) -> None:
        """Reload on each SIGHUP."""
        if not hasattr(signal, "SIGHUP"):
            return
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                try:
                    await self()
                except HeadraceError as error:
                    log.error("not reloaded: nothing has changed", reason=str(error))  # noqa: TRY400


def _json(content: object, status: int) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


# ── from outside ──────────────────────────────────────────────────────────────────────────────────────────────────


def ask(url: str, environ: dict[str, str]) -> Iterator[str]:
    """Have the server at *url* reload, and say in lines what came of it.

    Raises:
        StartError: nobody answers there, or the server has not reloaded.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or parts.hostname is None:
        raise StartError(f"--url must be the address of a server, such as http://127.0.0.1:8000, got {url}")
    keys = environ.get(KEYS_VARIABLE, "").split()
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    path = parts.path.rstrip("/").removesuffix("/v1") + PATH
    try:
        with closing(kinds[parts.scheme](parts.hostname, parts.port, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", path, headers=headers)
            response = connection.getresponse()
            body = msgspec.json.decode(response.read())
        if response.status != 200:
            raise StartError(f"{url} has not reloaded: {_reasons(body)}")
        yield from _lines(body)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, LookupError, TypeError) as error:
        raise StartError(f"no answer that makes sense from {url}: {error!r}") from None


def _reasons(body: Any) -> str:
    error = body["error"]
    return "\n".join(error.get("reasons") or [error["message"]])


def _lines(body: Any) -> Iterator[str]:
    old, new = body["old"], body["new"]
    yield f"fingerprint: {new}, as before" if old == new else f"fingerprint: {old} → {new}"
    yield f"settings changed: {', '.join(body['changed']) or 'none'}"
    yield f"plugins imported anew: {', '.join(body['plugins']) or 'none'}"
