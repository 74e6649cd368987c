"""What plugins add to the server and to the command line, and what they may not."""

from types import SimpleNamespace

import click
import httpx
import pytest
from click.testing import CliRunner
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headrace.hooks import config
from headrace.hooks.components import Bound
from headrace.hooks.errors import ConfigError, PluginError
from headrace.hooks.registry import Registry, plugin
from headrace.server import commands
from headrace.server.app import create_app
from headrace.server.cli import main
from headrace.server.extensions import Extensions, build_extensions
from headrace.server.metrics import Metrics
from tests.server.doors import ALL_SCOPES, keys, knock


def bound(name, component, owner="theirs"):
    return Bound(name=name, plugin=owner, component=component)


class Stamp:
    """A middleware that adds *name* to the header `x-stamps`."""

    def __init__(self, name):
        self.name = name

    def __call__(self, app):
        async def stamped(scope, receive, send):
            async def stamping(message):
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-stamps", self.name.encode())]
                await send(message)

            await app(scope, receive, stamping)

        return stamped


class Hello:
    def __init__(self, path="/hello"):
        self.path = path

    def routes(self):
        return [Route(self.path, lambda request: PlainTextResponse(f"hello {request.scope.get('tenant', '')}"))]


def app_with(engine, auth=None, **extensions):
    return create_app(
        engine,
        Metrics(),
        max_body_bytes=1000,
        ping_s=10,
        auth=auth,
        extensions=Extensions(**extensions),
    )


async def get(app, path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        return await client.get(path)


async def test_routes_stand_below_the_name_of_their_plugin(engine):
    app = app_with(engine, routes=(bound("a", Hello()), bound("b", Hello("/again")), bound("c", Hello(), "others")))
    for path in ("/plugins/theirs/hello", "/plugins/theirs/again", "/plugins/others/hello"):
        assert (await get(app, path)).text == "hello "
    assert (await get(app, "/hello")).status_code == 404


async def test_routes_of_plugins_need_a_key_as_all_others_do(engine, monkeypatch):
    auth = keys(monkeypatch, alice=("a-key", ALL_SCOPES))
    assert await knock(app_with(engine, auth, routes=(bound("a", Hello()),)), "/plugins/theirs/hello") == 401


async def test_middleware_runs_the_first_outermost(engine):
    app = app_with(engine, middleware=(bound("a", Stamp("outer")), bound("b", Stamp("inner"))))
    assert (await get(app, "/version")).headers.get_list("x-stamps") == ["inner", "outer"]


async def test_middleware_sees_no_request_without_a_key(engine, monkeypatch):
    seen = []

    def spying(app):
        async def spy(scope, receive, send):
            seen.append(scope["type"])
            await app(scope, receive, send)

        return spy

    auth = keys(monkeypatch, alice=("a-key", ALL_SCOPES))
    assert await knock(app_with(engine, auth, middleware=(bound("a", spying),)), "/v1/models") == 401
    assert seen == []


def test_routes_that_are_none_stop_the_start():
    component = SimpleNamespace(routes=lambda: ["/hello"])
    with pytest.raises(PluginError, match="plugin theirs: routes a must give Starlette routes, got str"):
        Extensions(routes=(bound("a", component),)).mounts()


def test_a_choice_that_nothing_installed_fills_stops_the_start():
    with pytest.raises(ConfigError, match=r"server\.routes"):
        build_extensions(config.load(sets=["server.routes=[{use='none-such'}]"]))
    assert build_extensions(config.load()) == Extensions()


# ── the command line ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def offer(monkeypatch):
    """Installs what gives the command `greet`, and allows it."""

    def offer(component):
        registry = Registry()
        hook = plugin(lambda register: register("greet", lambda context, options: component))
        hook.__name__ = "register_command"
        registry.add(SimpleNamespace(register_command=hook, headrace_api=1), "greeter")
        monkeypatch.setattr(commands.Registry, "discover", lambda **rest: registry)
        monkeypatch.setenv("HEADRACE__PLUGINS__ALLOW", "greeter")

    return offer


def test_a_command_of_a_plugin_is_listed_and_runs(offer):
    offer(SimpleNamespace(command=lambda: click.Command("greet", callback=lambda: click.echo("hello"), help="Greet.")))
    assert "greet" in CliRunner().invoke(main, ["--help"]).output
    assert CliRunner().invoke(main, ["greet"]).output == "hello\n"


def test_help_is_given_with_a_wrong_configuration_too(monkeypatch):
    monkeypatch.setenv("HEADRACE__PLUGINS__ALOW", "greeter")
    result = CliRunner().invoke(main, ["--help"])
    assert (result.exit_code, "serve" in result.output) == (0, True)


def test_a_plugin_cannot_take_the_place_of_our_own_command(offer, monkeypatch):
    offer(SimpleNamespace(command=lambda: click.Command("other")))
    assert main.get_command(click.Context(main), "serve").callback.__module__ == "headrace.server.cli"


def test_what_is_no_command_is_said_with_the_name_of_its_plugin(offer):
    offer(SimpleNamespace(command=lambda: "no command"))
    result = CliRunner().invoke(main, ["greet"])
    assert (result.exit_code, "plugin greeter" in result.output) == (2, True)


def test_no_plugin_is_looked_for_where_none_may_have_a_command(offer, monkeypatch):
    offer(SimpleNamespace(command=lambda: click.Command("greet")))
    monkeypatch.delenv("HEADRACE__PLUGINS__ALLOW")
    result = CliRunner().invoke(main, ["greet"])
    assert (result.exit_code, "No such command" in result.output) == (2, True)
