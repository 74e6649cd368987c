"""One completion in the terminal, printed as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TextIO

import click
import msgspec

from ..hooks.messages import TextPrompt, Usage
from ..hooks.params import SamplingParams

if TYPE_CHECKING:
    from ..core.local import LLM

FLAGS: Final = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
"""Fields of `SamplingParams` that have a flag here. Their limits are the engine's to check."""


def sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of sampling; what was given comes as `params`."""

    @wraps(command)
    def run(stop: tuple[str, ...], ignore_eos: bool, **values: Any) -> None:
        params = {name: value for name in FLAGS if (value := values.pop(name)) is not None}
        if stop:
            params["stop"] = stop
        if ignore_eos:
            params["ignore_eos"] = True
        command(params=params, **values)

    decorated: Callable[..., None] = run
    decorated = click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end.")(decorated)
    decorated = click.option("--stop", multiple=True, metavar="TEXT", help="Text to end at; repeatable.")(decorated)
    for name, kind in reversed(FLAGS.items()):
        flag = "--" + name.replace("_", "-")
        decorated = click.option(flag, name, type=kind, help=f"Unset: {_default(name)}.")(decorated)
    return decorated


def complete(llm: LLM, text: str, params: dict[str, Any], out: TextIO, notes: TextIO | None = None) -> None:
    """Print what follows *text*. An interrupt ends it.

    Args:
        notes: where to tell of tokens and seconds; None: nowhere.

    Raises:
        RequestError: what the request ended with.
    """
    started, first_at, usage = time.monotonic(), None, None
    try:
        with closing(llm.deltas(TextPrompt(text=text), params)) as deltas:
            for delta in deltas:
                first_at = first_at or time.monotonic()
                usage = delta.usage or usage
                out.write(delta.text if delta.choice == 0 else "")
                out.flush()
    except KeyboardInterrupt:
        out.write(" [stopped]")
    out.write("\n")
    if notes is not None and usage is not None and first_at is not None:
        notes.write(_note(usage, first_at - started, time.monotonic() - first_at))


def _note(usage: Usage, first_s: float, rest_s: float) -> str:
    rate = f", then {(usage.completion - 1) / rest_s:.1f} tokens/s" if usage.completion > 1 and rest_s > 0 else ""
    return f"{usage.prompt} tokens of prompt, {usage.completion} of answer: the first after {first_s:.2f} s{rate}\n"


def _default(name: str) -> str:
    default = msgspec.to_builtins(SamplingParams())[name]
    neutral = {None: "as long as there is room" if name == "max_tokens" else "a random one"}.get(default, str(default))
    return f"the server's default, else {neutral}"
