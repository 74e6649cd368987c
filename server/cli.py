"""The command line: `headrace serve`, `chat`, `complete`, `plan`, `doctor`, `bench`, `config`,
`plugins` and `completion`.

What needs torch is imported when a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..hooks.config import Loaded, Sources
from .bench.commands import bench
from .commands import Commands
from .complete import sampling_flags
from .config_cli import config
from .options import with_settings
from .plugins_cli import plugins

if TYPE_CHECKING:
    import socket

    from ..core.local import LLM
    from .reload import Configuration


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="headrace", prog_name="headrace")
def main() -> None:
    """Headrace, an LLM inference engine."""


@main.command()
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="HEADRACE_API_KEY",
    metavar="KEY",
    help="A key that clients must send; repeatable. Others here can see it; the environment is the place to hide it.",
)
@with_settings("model", "line", "sampling", "server", "plugins", using=lambda sources: sources)
def serve(loaded: Sources, api_keys: tuple[str, ...]) -> None:
    """Serve MODEL over HTTP, as OpenAI's API."""
    from . import logs
    from .reload import Configuration
    from .serve import listen

    configuration = Configuration(loaded)
    server = configuration.loaded.settings.server
    for_people = logs.configure(server.log_format, server.log_level)
    # Serving takes the socket over; until then it is ours to close.
    with listen(server.host, server.port, write_timeout_s=server.write_timeout_s) as sock:
        _serve(configuration, sock, api_keys, for_people=for_people)


def _serve(configuration: Configuration, sock: socket.socket, api_keys: tuple[str, ...], *, for_people: bool) -> None:
    import structlog
    import trio

    from .auth import build_auth
    from .extensions import build_extensions
    from .metrics import Metrics
    from .reload import Reload
    from .serve import serve, url
    from .vllm_metrics import VLLM

    log = structlog.get_logger()
    loaded = configuration.loaded
    auth = build_auth(loaded, api_keys)
    extensions = build_extensions(loaded)
    address = url(sock)
    log.info("listening", url=address, model=loaded.settings.model.uri, auth=auth.name if auth else "none")

    from ..core.engine import Engine

    server = loaded.settings.server
    metrics = Metrics(VLLM(loaded.settings.line) if server.metrics_compat == "vllm" else None)
    engine = Engine(loaded.settings, observers=[metrics], where=loaded.where)

    def ready() -> None:
        bar.close()
        if for_people:
            click.echo(engine.report, err=True)
        info = engine.info
        log.info(
            "ready",
            url=f"{address}/v1",
            model=info.name if info else None,
            max_model_len=info.max_model_len if info else None,
            **({} if for_people else {"plan": engine.report}),
        )

    with Bar() as bar:
        reload = Reload(engine, configuration.read)
        around = partial(serve, metrics=metrics, auth=auth, extensions=extensions, reload=reload)
        trio.run(partial(around, engine, sock, server, progress=bar.show, ready=ready))


@main.command()
@click.option("--url", help="Talk to the server there instead of loading MODEL here.")
@with_settings("model", "line", "sampling", "plugins")
def chat(loaded: Loaded, url: str | None) -> None:
    """Talk to MODEL in the terminal. /exit ends the talk, Ctrl-C the answer."""
    from .chat import remote, talk

    ask = partial(input, "> ")
    if url is not None:
        talk(remote(url), ask, sys.stdout)
        return

    with opened(loaded) as llm:
        talk(llm.stream_chat, ask, sys.stdout)


@main.command()
@click.argument("text")
@click.option("-v", "--verbose", is_flag=True, help="Tell of tokens and seconds in the end.")
@sampling_flags
@with_settings("model", "line", "sampling", "plugins", model="option")
def complete(loaded: Loaded, text: str, verbose: bool, params: dict[str, Any]) -> None:
    """Print what follows TEXT; `-` reads it from standard input."""
    from .complete import complete as print_completion

    text = sys.stdin.read() if text == "-" else text
    with opened(loaded) as llm:
        print_completion(llm, text, params, sys.stdout, sys.stderr if verbose else None)


@main.command()
@with_settings("model", "line", "plugins")
def plan(loaded: Loaded) -> None:
    """Print what memory MODEL would take, without loading its weights."""
    from ..core.engine import plan_memory

    click.echo(plan_memory(loaded.settings, loaded.where))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--self-test-s", default=10.0, show_default=True, metavar="SECONDS", help="0: do not load the model.")
@with_settings("model", "line", "sampling", "server", "plugins")
def doctor(loaded: Loaded, as_json: bool, self_test_s: float) -> None:
    """Find out whether MODEL can be served here. Ends with 1 where something is wrong."""
    import msgspec

    from . import logs
    from .doctor import examine

    logs.configure("console", "error")
    healthy = True
    with Bar() as bar:
        for finding in examine(loaded, self_test_s=self_test_s, progress=bar.show):
            bar.close()
            healthy = healthy and finding.ok
            click.echo(msgspec.json.encode(finding) if as_json else finding)
    sys.exit(0 if healthy else 1)


main.add_command(plugins)
main.add_command(config)
main.add_command(bench)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes commands and flags in SHELL: `eval "$(headrace completion bash)"`."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "headrace", "_HEADRACE_COMPLETE").source())


@contextmanager
def opened(loaded: Loaded) -> Iterator[LLM]:
    """The model in this process, with a bar while it loads and a quiet log."""
    from ..core.engine import Engine
    from ..core.local import run
    from . import logs

    logs.configure("console", "warning")
    with Bar() as bar, run(Engine(loaded.settings, where=loaded.where), bar.show) as llm:
        bar.close()
        yield llm


class Bar:
    """A progress bar on a terminal, and nothing elsewhere."""

    def __init__(self) -> None:
        self._what = ""
        self._bar: Any = None

    def show(self, what: str, done: int, total: int) -> None:
        """Called from any one thread."""
        if not sys.stderr.isatty():
            return
        if what != self._what:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self.close()
            self._what = what
            self._bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
