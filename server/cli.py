"""The command line: `headrace serve`, `chat` and `plan`.

What needs torch is imported when a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import click

from ..hooks.config import Loaded
from .options import with_settings


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="headrace", prog_name="headrace")
def main() -> None:
    """Headrace, an LLM inference engine."""


@main.command()
@with_settings("model", "line", "sampling", "server", "plugins")
def serve(loaded: Loaded) -> None:
    """Serve MODEL over HTTP, as OpenAI's API."""
    import structlog
    import trio

    from . import logs
    from .metrics import Metrics
    from .serve import listen, url
    from .serve import serve as serve_engine

    server = loaded.settings.server
    for_people = logs.configure(server.log_format, server.log_level)
    log = structlog.get_logger()
    sock = listen(server.host, server.port, write_timeout_s=server.write_timeout_s)
    address = url(sock)
    log.info("listening", url=address, model=loaded.settings.model.uri)

    from ..core.engine import Engine

    metrics = Metrics()
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
        trio.run(partial(serve_engine, engine, sock, server, metrics=metrics, progress=bar.show, ready=ready))


@main.command()
@click.option("--url", help="Talk to the server there instead of loading MODEL here.")
@with_settings("model", "line", "sampling", "plugins")
def chat(loaded: Loaded, url: str | None) -> None:
    """Talk to MODEL in the terminal. /exit ends the talk, Ctrl-C the answer."""
    from .chat import local, remote, talk

    ask = partial(input, "> ")
    if url is not None:
        talk(remote(url), ask, sys.stdout)
        return

    from ..core.engine import Engine
    from . import logs

    logs.configure("console", "warning")
    with Bar() as bar, local(Engine(loaded.settings, where=loaded.where), bar.show) as answer:
        bar.close()
        talk(answer, ask, sys.stdout)


@main.command()
@with_settings("model", "line", "plugins")
def plan(loaded: Loaded) -> None:
    """Print what memory MODEL would take, without loading its weights."""
    from ..core.engine import plan_memory

    click.echo(plan_memory(loaded.settings, loaded.where))


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
