"""Who gets in: keys, scopes, every route, and what happens when the one who decides fails."""

import json

import httpx
import pytest
import trio
from starlette.routing import Route, WebSocketRoute
from structlog.testing import capture_logs

from headrace.hooks import config
from headrace.hooks.errors import ConfigError, StartError
from headrace.plugins import static_keys
from headrace.server.auth import Unauthorized, build_auth, joined, scope_for
from tests.server.doors import ALL_SCOPES, app_behind, build, keys, knock, stranger
from tests.server.site import running

KEY = "a-key-that-nobody-guesses"
BEARER = [(b"authorization", b"Bearer " + KEY.encode())]


@pytest.fixture
def auth(monkeypatch):
    return keys(monkeypatch, alice=(KEY, ALL_SCOPES))


@pytest.fixture
async def ready(engine, nursery):
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    return engine


def routes(app) -> list[tuple[str, str, str]]:
    """(kind, method, path) of everything the application answers, with something in place of parameters."""
    found = [("http", "GET", "/nowhere"), ("websocket", "GET", "/nowhere"), ("http", "OPTIONS", "/v1/models")]
    for route in app.routes:
        assert isinstance(route, Route | WebSocketRoute), f"{route}: tell this test how to knock there"
        path = route.path.replace("{name:path}", "fake")
        if isinstance(route, WebSocketRoute):
            found.append(("websocket", "GET", path))
        else:
            found += [("http", method, path) for method in route.methods or ("GET",)]
    return found


# ── every route ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_route_answers_401_without_a_key(ready, auth):
    app = app_behind(auth, ready)
    statuses = {}
    for kind, method, path in routes(app):
        statuses[kind, method, path] = await knock(app, path, method=method, kind=kind)
    assert len(statuses) > 8
    assert {where: status for where, status in statuses.items() if status != 401} == {}


async def test_every_route_lets_a_key_with_all_scopes_pass(ready, auth):
    app = app_behind(auth, ready)
    for kind, method, path in routes(app):
        assert await knock(app, path, method=method, kind=kind, headers=BEARER) not in (401, 403)


async def test_without_auth_nobody_needs_a_key(ready):
    assert await knock(app_behind(None, ready), "/v1/models") == 200


async def test_an_open_route_needs_no_key_and_opens_nothing_below_it(ready, auth):
    app = app_behind(auth, ready, open_routes=("/health",))
    assert await knock(app, "/health") == 200
    assert await knock(app, "/health/") == await knock(app, "/ready") == 401


async def test_a_preflight_of_an_allowed_page_needs_no_key_and_its_refusal_can_be_read(ready, auth):
    app = app_behind(auth, ready, cors_origins=["http://page"])
    asks = [(b"origin", b"http://page"), (b"access-control-request-method", b"POST")]
    assert await knock(app, "/v1/chat/completions", method="OPTIONS", headers=asks) == 200
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/v1/models", headers={"origin": "http://page"})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "http://page"


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("authorization", f"Bearer {KEY}", 200),
        ("authorization", f"bearer   {KEY} ", 200),
        ("x-api-key", KEY, 200),
        ("authorization", KEY, 401),
        ("authorization", f"Basic {KEY}", 401),
        ("authorization", "Bearer ", 401),
        ("x-api-key", KEY[:-1], 401),
        ("x-api-key", KEY + "x", 401),
        ("x-api-key", KEY.upper(), 401),
    ],
)
async def test_a_key_must_be_whole_and_in_its_place(ready, auth, name, value, status):
    assert await knock(app_behind(auth, ready), "/v1/models", headers=[(name.encode(), value.encode())]) == status


async def test_a_key_sent_twice_is_refused(ready, auth):
    assert await knock(app_behind(auth, ready), "/v1/models", headers=[*BEARER, (b"authorization", b"Bearer x")]) == 401


async def test_a_refusal_is_an_openai_error_with_a_challenge(ready, auth):
    transport = httpx.ASGITransport(app_behind(auth, ready))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)


async def test_all_keys_of_a_source_open_for_its_name(ready, monkeypatch):
    auth = keys(monkeypatch, team=("old-key new-key", None))
    for key in (b"old-key", b"new-key"):
        assert await auth.component.identify({b"x-api-key": key}) == "team"


async def test_the_keys_name_is_the_requests_tenant(engine, monkeypatch):
    tenants = []

    class Noting(type(engine)):
        def request(self, *args, tenant="", **rest):
            tenants.append(tenant)
            return super().request(*args, tenant=tenant, **rest)

    auth = keys(monkeypatch, alice=(KEY, None))
    async with running(Noting(), auth=auth) as site:
        site.client.headers["x-api-key"] = KEY
        assert (await site.chat()).status_code == 200
    assert tenants == ["alice"]


async def test_a_websocket_without_a_key_is_refused_on_the_wire(engine, auth):
    upgrade = (
        "GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    async with running(engine, auth=auth) as site, await site.connect() as stream:
        await stream.send_all(upgrade.encode())
        with trio.fail_after(5):
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 401")


# ── scopes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/v1/chat/completions", "infer"),
        ("/nowhere", "infer"),
        ("/v1/models", "models"),
        ("/v1/models/some/name", "models"),
        ("/v1/modelsx", "infer"),
        ("/metrics", "metrics"),
        ("/debug/tasks", "admin"),
        ("/health", None),
    ],
)
def test_a_path_takes_a_scope(path, scope):
    assert scope_for(path) == scope


async def test_a_key_opens_what_its_scopes_say(ready, monkeypatch):
    app = app_behind(keys(monkeypatch, scraper=("scrape", ["metrics"])), ready)
    paths = ("/metrics", "/health", "/v1/models", "/debug/tasks")
    assert [await knock(app, path, headers=[(b"x-api-key", b"scrape")]) for path in paths] == [200, 200, 403, 403]


async def test_a_key_without_scopes_opens_everything_but_administration(ready, monkeypatch):
    app = app_behind(keys(monkeypatch, app=("plain", None)), ready)
    paths = ("/metrics", "/v1/models", "/debug/tasks")
    assert [await knock(app, path, headers=[(b"x-api-key", b"plain")]) for path in paths] == [200, 200, 403]


# ── somebody else's ───────────────────────────────────────────────────────────────────────────────────────────────


class Says:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def identify(self, headers):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "status"), [("bob", 200), ("", 200), (None, 401), (True, 503), (RuntimeError(KEY), 503)]
)
async def test_whatever_goes_wrong_with_who_decides_nobody_is_let_in(ready, answer, status):
    with capture_logs() as lines:
        assert await knock(app_behind(stranger(Says(answer)), ready), "/v1/models", headers=BEARER) == status
    assert [line["auth"] for line in lines] == (["door/strange"] if status == 503 else [])
    assert KEY not in repr(lines)


async def test_who_decides_may_raise_a_refusal_of_its_own_only_as_503(ready):
    assert await knock(app_behind(stranger(Says(Unauthorized("no"))), ready), "/v1/models") == 503


async def test_who_never_decides_is_given_up(ready, autojump_clock):
    class Silent:
        async def identify(self, headers):
            await trio.sleep_forever()

    assert await knock(app_behind(stranger(Silent()), ready), "/v1/models") == 503


async def test_a_stranger_has_all_scopes_but_admin(ready):
    app = app_behind(stranger(Says("bob")), ready)
    assert [await knock(app, path) for path in ("/metrics", "/v1/models", "/debug/x")] == [200, 200, 403]


# ── configuration ─────────────────────────────────────────────────────────────────────────────────────────────────


def one_key(**source: str) -> dict[str, object]:
    return {"keys": [{"name": "a", "key": source}]}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (one_key(env="NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE must hold a key"),
        (one_key(file="/no/such/file"), "/no/such/file must hold a key, and cannot be read"),
        (one_key(), "one of the two"),
        (one_key(env="A", file="B"), "one of the two"),
        ({"keys": []}, "keys"),
        ({"keys": [{"name": "a", "key": "secret"}]}, "key"),
        ({"keys": [{"name": "a", "key": {"env": "A"}, "scopes": ["root"]}]}, "scopes"),
    ],
)
def test_keys_that_cannot_be_had_end_the_start(options, reason):
    with pytest.raises(StartError, match=reason):
        build(static_keys, "static-keys", options)


def test_keys_of_one_name_must_have_the_same_scopes(monkeypatch):
    monkeypatch.setenv("SOME_KEYS", "k")
    source = {"env": "SOME_KEYS"}
    entries = [{"name": "a", "key": source}, {"name": "a", "key": source, "scopes": ["admin"]}]
    with pytest.raises(StartError, match="same scopes"):
        build(static_keys, "static-keys", {"keys": entries})


def test_a_key_belongs_to_one_name(monkeypatch):
    with pytest.raises(StartError, match="alice and bob must have different keys"):
        keys(monkeypatch, alice=("same other", None), bob=("same", None))


async def test_a_file_may_hold_the_key(tmp_path):
    (tmp_path / "key").write_text("from-a-file\n")
    auth = build(static_keys, "static-keys", one_key(file=str(tmp_path / "key")))
    assert await auth.component.identify({b"x-api-key": b"from-a-file"}) == "a"


def test_a_built_auth_does_not_show_its_keys(auth):
    assert KEY not in repr(auth) + json.dumps(repr(vars(auth.component)))


def test_keys_of_the_command_line_stand_in_no_setting(monkeypatch):
    monkeypatch.setenv("HEADRACE_API_KEY", "")
    loaded = config.load()
    auth = build_auth(loaded, ["first", "second"])
    assert auth is not None
    assert auth.name == "static-keys"
    assert "first" not in repr(auth.options) + repr(loaded)


def test_keys_of_the_command_line_and_configured_ones_exclude_each_other():
    loaded = config.load(sets=['server.auth={use="static-keys"}'])
    with pytest.raises(ConfigError, match=r"--set: server\.auth: .*set one of them"):
        build_auth(loaded, ["key"])


def test_nothing_configured_means_no_door():
    assert build_auth(config.load()) is None


def test_a_repeated_header_is_one_list():
    assert joined([(b"A", b"1"), (b"b", b"2"), (b"a", b"3")]) == {b"a": b"1, 3", b"b": b"2"}
