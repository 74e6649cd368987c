"""An application behind a door of static keys, and the ways to knock."""

from __future__ import annotations

from types import SimpleNamespace

from starlette.applications import Starlette

from headrace.hooks.config import Use
from headrace.hooks.protocols import Context
from headrace.hooks.registry import Bound, Registry, plugin
from headrace.plugins import static_keys
from headrace.server.app import create_app
from headrace.server.metrics import Metrics
from tests.server.fake_engine import FakeEngine

ALL_SCOPES = ["infer", "models", "metrics", "admin"]


def keys(monkeypatch, **by_name: tuple[str, list[str] | None]) -> Bound:
    """Auth `static-keys` as a configuration would choose it; each key stands in the environment."""
    entries = []
    for name, (key, scopes) in by_name.items():
        monkeypatch.setenv(f"KEY_OF_{name.upper()}", key)
        entry = {"name": name, "key": {"env": f"KEY_OF_{name.upper()}"}}
        entries.append(entry if scopes is None else {**entry, "scopes": scopes})
    return build(static_keys, "static-keys", {"keys": entries})


def build(module: object, name: str, options: dict[str, object]) -> Bound:
    """The auth component *name* of a plugin, built by the registry."""
    registry = Registry()
    registry.add(module, "door")
    return registry.build("auth", Use(use=name, options=options), Context())


def stranger(component: object) -> Bound:
    """Somebody else's auth component."""

    @plugin
    def register_auth(register):
        register("strange", lambda context, options: component)

    return build(SimpleNamespace(register_auth=register_auth), "strange", {})


def app_behind(auth: Bound | None, engine: FakeEngine, **more: object) -> Starlette:
    return create_app(engine, Metrics(), max_body_bytes=100_000, ping_s=15, body_timeout_s=5, auth=auth, **more)


async def knock(app: Starlette, path: str, *, method: str = "GET", headers=(), kind: str = "http") -> int:
    """The status of the answer; of a WebSocket, 101 where it is let in and 404 where it is closed unheard."""
    sent = []
    first = {"type": "websocket.connect"} if kind == "websocket" else {"type": "http.request", "body": b""}
    messages = [first]

    async def receive():
        return messages.pop(0) if messages else {"type": f"{kind}.disconnect", "code": 1006}

    async def send(message):
        sent.append(message)

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "query_string": b"",
        "headers": list(headers),
        "subprotocols": ["headrace.v1"],
        "extensions": {"websocket.http.response": {}},
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(
        {key: value for key, value in scope.items() if kind == "websocket" or key != "subprotocols"}, receive, send
    )
    match sent[0]:
        case {"type": "websocket.accept"}:
            return 101
        case {"type": "websocket.close"}:
            return 404
    return sent[0]["status"]
