"""`headrace bench`: commands that measure. What they need is imported when one runs."""

from __future__ import annotations

import secrets
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from ...hooks.errors import StartError
from .lengths import Length, parse_length
from .settings import Load, Targets
from .step import step

DEFAULT_REQUESTS: Final = 64


def _length(ctx: click.Context, param: click.Parameter, value: str | None) -> Length | None:
    """A number of tokens, or a distribution of it."""
    try:
        return None if value is None else parse_length(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _fields(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, msgspec.Raw]:
    """`NAME=JSON` each: fields of each request's body."""
    fields = {}
    for value in values:
        name, _, text = value.partition("=")
        try:
            msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise click.BadParameter(f"must be NAME=JSON, such as temperature=0, got {value}: {error}") from None
        fields[name] = msgspec.Raw(text.encode())
    return fields


def _new_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A file that is written in the end; better to know now that it cannot be."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} must be a folder that exists")
    return value


PATH: Final = click.Path(dir_okay=False, path_type=Path)
LENGTHS: Final = "128, 64-256 or lognormal:MEAN,SIGMA[,MAX]"
POSITIVE: Final = click.FloatRange(0, min_open=True)


@click.group()
def bench() -> None:
    """Measure how fast answers come."""


bench.add_command(step)


@bench.command()
@click.argument("url")
@click.option("--api", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("-m", "--model", help="Unset: the first that the server lists.")
@click.option("--api-key", envvar="HEADRACE_API_KEY", metavar="KEY", help="Better in the environment.")
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="Closed loop: N at a time. Unset: 1.")
@click.option("--rate", type=POSITIVE, metavar="R", help="Open loop: R requests/s (Poisson).")
@click.option("--max-in-flight", type=click.IntRange(1), default=1024, show_default=True, help="Of an open loop.")
@click.option("--requests", type=click.IntRange(1), metavar="N", help=f"Unset, and no duration: {DEFAULT_REQUESTS}.")
@click.option("--duration", type=POSITIVE, metavar="SECONDS", help="Send so long.")
@click.option(
    "--prompt-tokens",
    metavar="TOKENS",
    callback=_length,
    default="128",
    show_default=True,
    help=f"{LENGTHS}.",
)
@click.option(
    "--output-tokens", callback=_length, metavar="TOKENS", help="So too. Unset: 128, or as the data set's answers."
)
@click.option("--shared-prefix", type=click.IntRange(0), default=0, metavar="TOKENS", help="In front of each prompt.")
@click.option("--num-prefixes", type=click.IntRange(1), default=1, show_default=True, help="Different ones, in turn.")
@click.option("--warm-prefixes", is_flag=True, help="Ask for each prefix once before the clock runs.")
@click.option("--dataset", type=PATH, help="Prompts in ShareGPT's JSON.")
@click.option("--ignore-eos", is_flag=True, help="Answers go on to their full length.")
@click.option(
    "--param",
    "params",
    callback=_fields,
    multiple=True,
    metavar="NAME=JSON",
    help="A field of each body, such as temperature=0.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of lengths, arrivals and order.")
@click.option("--run-id", metavar="TEXT", help="Of the words. Unset: a new one, so that no cache knows them.")
@click.option("--warmup", type=click.IntRange(0), default=0, metavar="N", help="Requests before the clock runs.")
@click.option("--timeout", type=POSITIVE, default=600.0, show_default=True, metavar="SECONDS", help="Of one request.")
@click.option("--target-ttft", type=float, metavar="MS", help="Goodput: time to the first token.")
@click.option("--target-itl", type=float, metavar="MS", help="Goodput: a request's mean time between tokens.")
@click.option("--target-e2e", type=float, metavar="MS", help="Goodput: time to the end.")
@click.option("--json", "json_file", type=PATH, callback=_new_file, help="Write the report and a row for each request.")
@click.option(
    "--plot", "plot_file", type=PATH, callback=_new_file, metavar="FILE.png", help="Draw it. Needs headrace[bench]."
)
def load(json_file: Path | None, plot_file: Path | None, api_key: str | None, **asked: Any) -> None:
    """Send requests to the OpenAI-compatible server at URL, and tell how it fared.

    Ends with 1 where no request was complete.
    """
    if plot_file is not None and find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib, which is not installed: pip install 'headrace[bench]'")
    try:
        _load(_settings(**asked), json_file, plot_file, api_key)
    except StartError as error:
        raise click.ClickException(str(error)) from None


def _settings(
    *,
    concurrency: int | None,
    rate: float | None,
    requests: int | None,
    duration: float | None,
    shared_prefix: int,
    run_id: str | None,
    warmup: int,
    timeout: float,
    target_ttft: float | None,
    target_itl: float | None,
    target_e2e: float | None,
    **same: Any,
) -> Load:
    if rate is not None and concurrency is not None:
        raise click.UsageError(
            "give --rate or --concurrency: an open loop bounds what is under way with --max-in-flight"
        )
    return Load(
        run_id=run_id or secrets.token_hex(4),
        concurrency=concurrency or 1 if rate is None else None,
        rate=rate,
        num_requests=DEFAULT_REQUESTS if requests is None and duration is None else requests,
        duration_s=duration,
        shared_prefix_tokens=shared_prefix,
        num_warmups=warmup,
        timeout_s=timeout,
        targets=Targets(ttft_ms=target_ttft, itl_ms=target_itl, e2e_ms=target_e2e),
        **same,
    )


def _load(settings: Load, json_file: Path | None, plot_file: Path | None, api_key: str | None) -> None:
    import trio
    from tqdm import tqdm  # type: ignore[import-untyped]

    from .load import run
    from .show import lines

    with tqdm(total=settings.num_requests, unit=" requests", leave=False, disable=not sys.stderr.isatty()) as bar:
        report, records = trio.run(partial(run, settings, api_key=api_key, progress=lambda _: bar.update()))
    for line in lines(report):
        click.echo(line)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=1))
    if plot_file is not None:
        from .plot import plot

        plot(plot_file, report, records)
    if report.num_complete == 0:
        sys.exit(1)
