"""`headrace bench step`: how long a step of the model takes, in which parts, and how far from the machine's limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from ...hooks.config import Loaded
from ..options import with_settings

if TYPE_CHECKING:
    from ...core.engine import Limits, StepTime

PATH: Final = click.Path(dir_okay=False, path_type=Path)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS: Final = (1, 16, 64, 256, 512, 1024, 4096)
SHOWN_PARTS: Final = 4


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        numbers = tuple(int(part) for part in value.split(",") if part)
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise click.BadParameter(f"must be whole numbers from 1 on, joined by commas, got {value}")
    return numbers


@click.command()
@click.option(
    "--batch", "batches", callback=_numbers, metavar="N,…", help="Sequences that decode together. Unset: 1…256."
)
@click.option("--prefill", "prompts", callback=_numbers, metavar="N,…", help="Of one prompt. Unset: 1…4096.")
@click.option(
    "--context", type=click.IntRange(0), default=192, show_default=True, help="Tokens a decode looks back on."
)
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="Of each kind of step.")
@click.option("--json", "json_file", type=PATH, help="Write all figures, each part of a step too.")
@with_settings("model", "line", "plugins")
def step(
    loaded: Loaded,
    batches: tuple[int, ...] | None,
    prompts: tuple[int, ...] | None,
    context: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Time steps of MODEL alone, without a server or requests."""
    from ...core.engine import measure_steps, quiet

    asked: dict[str, Any] = {
        "batches": BATCHES if batches is None else batches,
        "prompts": PROMPTS if prompts is None else prompts,
        "context": context,
        "rounds": rounds,
    }
    found = measure_steps(loaded.settings, quiet, loaded.where, **asked)
    kept: list[Limits | StepTime] = []
    for figures in found:
        kept.append(figures)
        click.echo(line(figures))
    if json_file is not None:
        limits, *times = kept
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode({"limits": limits, "steps": times}), indent=1))


def line(figures: Limits | StepTime) -> str:
    """One line of the report."""
    from ...core.engine import Limits

    if isinstance(figures, Limits):
        return _limits(figures)
    share = "" if figures.limit_s is None else f"  {figures.limit_s / figures.median_s:4.0%} of the limit"
    total = sum(figures.parts.values())
    largest = sorted(figures.parts.items(), key=lambda part: -part[1])[:SHOWN_PARTS]
    parts = "  ".join(f"{name} {seconds / total:.0%}" for name, seconds in largest)
    times = f"{figures.median_s * 1e3:9.2f} ms (best {figures.best_s * 1e3:.2f})"
    return (
        f"{figures.kind:<7} {figures.size:>5} {times:<30} {figures.tokens_per_s:8.0f} tokens/s{share}  {parts}".rstrip()
    )


def _limits(figures: Limits) -> str:
    if figures.read_bytes_per_s is None or figures.products_per_s is None or figures.weight_bytes is None:
        return f"kernels {figures.kernels}"
    breaks = ", ".join(f"{name} {count}" for name, count in figures.breaks.items()) or "none"
    numbers = "bfloat16 numbers" if figures.kernels == "amx" else "small integers"
    return (
        f"kernels {figures.kernels}, segments broken by: {breaks}; this machine reads "
        f"{figures.read_bytes_per_s / 1e9:.1f} GB/s and multiplies {figures.products_per_s / 1e9:.0f} · 10⁹ "
        f"{numbers} a second; the weights are {figures.weight_bytes / 1e6:.0f} MB"
    )
