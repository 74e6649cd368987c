"""The admin route, who may use it, what it answers; the command that uses it; SIGHUP."""

from __future__ import annotations

import os
import signal

import httpx
import pytest
import trio
from click.testing import CliRunner
from structlog.testing import capture_logs

from headrace.core.engine import Reloaded
from headrace.hooks.config import Sources
from headrace.hooks.errors import ConfigError, Conflict
from headrace.hooks.settings import Sampling, Settings
from headrace.server.cli import main
from headrace.server.reload import PATH, Configuration, Reload
from tests.fakes import make_stack
from tests.server.doors import ALL_SCOPES, app_behind, keys, knock
from tests.server.fake_engine import FakeEngine
from tests.server.site import running

KEY = "the-operators-own-key"
GUEST = "a-guest-s-key"
REPORT = Reloaded(old="fp_fake", new="fp_new", changed=("line.policy",), plugins=("acme 1.0 → 1.1",))


class Reloading(FakeEngine):
    """A fake engine that notes the settings it is to serve by."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.settings: list[Settings] = []
        self.heard = trio.Event()

    async def reload(self, settings: Settings, *, where: object) -> Reloaded:
        await trio.lowlevel.checkpoint()
        self.settings.append(settings)
        self.heard.set()
        if self.error is not None:
            raise self.error
        return REPORT


@pytest.fixture
def engine() -> Reloading:
    return Reloading()


@pytest.fixture
def reload(engine, tmp_path, monkeypatch) -> Reload:
    """Reads a headrace.toml in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "headrace.toml").write_text("[sampling]\nlocked = ['seed']\n")
    return Reload(engine, Configuration(Sources()).read)


@pytest.fixture
def auth(monkeypatch):
    return keys(monkeypatch, ops=(KEY, ALL_SCOPES), guest=(GUEST, None))


async def post(app, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post(PATH, headers=headers)


# ── the route ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_it_says_what_was_there_and_what_serves_now(engine, reload, auth):
    answer = await post(app_behind(auth, engine, reload=reload), KEY)
    assert answer.status_code == 200
    assert answer.json() == {
        "old": "fp_fake",
        "new": "fp_new",
        "changed": ["line.policy"],
        "plugins": ["acme 1.0 → 1.1"],
    }
    assert engine.settings == [Settings(sampling=Sampling(locked=("seed",)))]


async def test_the_configuration_is_read_each_time(engine, reload, auth, tmp_path):
    app = app_behind(auth, engine, reload=reload)
    await post(app, KEY)
    (tmp_path / "headrace.toml").write_text("")
    await post(app, KEY)
    assert [settings.sampling.locked for settings in engine.settings] == [("seed",), ()]


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), (GUEST, 403), (KEY, 200)])
async def test_it_takes_the_scope_admin(engine, reload, auth, key, status):
    answer = await post(app_behind(auth, engine, reload=reload), key)
    assert answer.status_code == status
    assert bool(engine.settings) is (status == 200)


async def test_without_auth_nobody_may(engine, reload):
    answer = await post(app_behind(None, engine, reload=reload))
    assert answer.status_code == 403
    assert "set server.auth, or send the process SIGHUP" in answer.json()["error"]["message"]
    assert engine.settings == []


async def test_an_open_route_does_not_open_it(engine, reload, auth):
    answer = await post(app_behind(auth, engine, reload=reload, open_routes=(PATH,)))
    assert answer.status_code == 403
    assert engine.settings == []


async def test_only_post_reloads(engine, reload, auth):
    headers = [(b"x-api-key", KEY.encode())]
    assert await knock(app_behind(auth, engine, reload=reload), PATH, headers=headers) == 405
    assert engine.settings == []


async def test_a_stack_that_cannot_be_built_is_422_with_all_reasons(engine, reload, auth):
    engine.error = ConfigError("line.max_running: needs a restart\nsampling.sampler: no sampler called 'x'")
    answer = await post(app_behind(auth, engine, reload=reload), KEY)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "reload_failed"
    assert error["reasons"] == ["line.max_running: needs a restart", "sampling.sampler: no sampler called 'x'"]


async def test_a_configuration_that_cannot_be_read_is_422_and_the_engine_hears_nothing(engine, reload, auth, tmp_path):
    (tmp_path / "headrace.toml").write_text("[sampling]\nlokced = []\nsampler = 7\n")
    answer = await post(app_behind(auth, engine, reload=reload), KEY)
    assert answer.status_code == 422
    assert len(answer.json()["error"]["reasons"]) == 2
    assert engine.settings == []


async def test_a_second_one_at_the_same_time_is_409(engine, reload, auth):
    engine.error = Conflict("another reload is under way", code="reload_under_way")
    answer = await post(app_behind(auth, engine, reload=reload), KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "reload_under_way")


async def test_without_a_configuration_to_read_there_is_no_route(engine, auth):
    assert (await post(app_behind(auth, engine), KEY)).status_code == 404


# ── fingerprints ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_answer_tells_the_fingerprint_of_what_its_request_was_resolved_on(engine):
    """Also where the engine was reloaded after the body was read."""
    made = engine.request

    def request(*args, **kwargs):
        request = made(*args, **kwargs)
        request.stack = make_stack()
        return request

    engine.request = request
    body = {"prompt": "a b", "max_tokens": 3}
    async with running(engine) as site:
        whole = (await site.client.post("/v1/completions", json=body)).json()
        stream = await site.client.post("/v1/completions", json={**body, "stream": True})
        several = (await site.client.post("/v1/completions", json={**body, "prompt": ["a", "b"]})).json()
    assert whole["system_fingerprint"] == several["system_fingerprint"] == "fake"
    lines = [line for line in stream.text.splitlines() if line.startswith("data: {")]
    assert len(lines) == 3
    assert all('"system_fingerprint":"fake"' in line for line in lines)


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def serving(engine, reload, auth):
    return lambda: running(engine, auth=auth, reload=reload)


async def command(*arguments: str, key: str | None = None):
    environ = {"HEADRACE_API_KEY": key}
    return await trio.to_thread.run_sync(
        lambda: CliRunner().invoke(main, ["plugins", "reload", *arguments], env=environ)
    )


async def test_the_command_sends_the_key_and_tells_what_came_of_it(serving):
    async with serving() as site:
        result = await command("--url", site.url, key=KEY)
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "fingerprint: fp_fake → fp_new",
        "settings changed: line.policy",
        "plugins imported anew: acme 1.0 → 1.1",
    ]


async def test_the_command_tells_every_reason_and_ends_with_1(serving, engine):
    engine.error = ConfigError("first reason\nsecond reason")
    async with serving() as site:
        result = await command("--url", f"{site.url}/v1", key=KEY)
    assert result.exit_code == 1
    assert "has not reloaded: first reason\nsecond reason" in result.output


@pytest.mark.parametrize(("key", "said"), [(None, "a known API key is needed"), (GUEST, "scope admin")])
async def test_the_command_says_whose_key_is_missing(serving, key, said):
    async with serving() as site:
        result = await command("--url", site.url, key=key)
    assert result.exit_code == 1
    assert said in result.output


async def test_the_command_says_that_nobody_answers():
    result = await command("--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no answer that makes sense from http://127.0.0.1:1" in result.output
    assert (await command("--url", "ftp://x")).exit_code == 1


# ── SIGHUP ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_sighup_reloads_and_a_failure_is_logged(engine, reload, nursery):
    nursery.start_soon(reload.on_hangup)
    await trio.testing.wait_all_tasks_blocked()
    with capture_logs() as logs:
        engine.error = ConfigError("no such policy")
        os.kill(os.getpid(), signal.SIGHUP)
        with trio.fail_after(10):
            await engine.heard.wait()
            while not logs:  # noqa: ASYNC110, for nobody would set an event.
                await trio.sleep(0.002)
    assert logs[0]["event"] == "not reloaded: nothing has changed"
    assert logs[0]["reason"] == "no such policy"
    engine.error, engine.heard = None, trio.Event()
    os.kill(os.getpid(), signal.SIGHUP)
    with trio.fail_after(10):
        await engine.heard.wait()
