"""What one call of a logits processor, a sampler or a scheduler policy costs."""

from __future__ import annotations

import time
import tomllib
from array import array
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from ..hooks.config import Loaded
from ..hooks.decode import Problem, decode
from ..hooks.errors import ConfigError
from ..hooks.messages import Admit
from ..hooks.origins import Where
from ..hooks.params import SamplingParams
from ..hooks.protocols import Context, Rows, RunningView, SamplingContext, WaitingView
from ..hooks.stack import NoParams
from .plugins_list import find, registry_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..hooks.components import Bound

BATCHES: Final = (1, 8, 64)
CANDIDATES: Final = (64, 256, 1024)
NUM_PROMPT: Final = 128
NUM_OUTPUT: Final = 128
LEAST_CALLS: Final = 5


def bench(
    loaded: Loaded, name: str, slot: str | None, *, vocab_size: int, options: str, params: str, seconds: float
) -> Iterator[str]:
    """A table, line by line: batch or candidates, median microseconds a call, and for each of them. One thread.

    Args:
        options, params: TOML inline tables.
        seconds: how long to measure each row.

    Raises:
        ConfigError: no such component, or not one that can be measured alone; or *options* or *params* are wrong.
    """
    component = find(registry_of(loaded), name, slot)
    measure = _MEASURES.get(component.slot.name)
    if measure is None:
        known = ", ".join(_MEASURES)
        raise ConfigError(f"bench measures {known}; the slot of {component.name} is {component.slot.name}")
    context = Context(sampling=SamplingContext(vocab_size=vocab_size, num_slots=max(BATCHES)))
    bound = component.build(context, table("options", options), Where(("--options",)))
    asked = _decoded(table("params", params), bound)
    yield f"{component.slot.name} {component.name} of plugin {component.plugin}"
    yield from measure(bound, asked, vocab_size, seconds)


def table(what: str, text: str) -> dict[str, Any]:
    """*text* as the TOML inline table it must be."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--{what}: must be a TOML inline table, such as {{ p = 0.9 }}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--{what}: must be a TOML inline table, such as {{ p = 0.9 }}, got {text}")
    return value


def _decoded(asked: Mapping[str, Any], bound: Bound) -> Struct:
    problems: list[Problem] = []
    made = decode(asked, bound.params or NoParams, Where(("--params",)), problems)
    if made is None:
        raise ConfigError("\n".join(map(str, problems)))
    return made


class FixedHistory:
    """The same prompt and answer in every slot; a `protocols.History`."""

    def __init__(self, vocab_size: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(vocab_size, (NUM_PROMPT,), generator=generator)
        self._output = torch.randint(vocab_size, (NUM_OUTPUT,), generator=generator)
        ids, counts = torch.unique(self._output, return_counts=True)
        self._counts = (ids, counts.float())
        self._seen: Tensor = torch.unique(torch.cat((self._prompt, self._output)))

    def prompt(self, slot: int) -> Tensor:
        return self._prompt

    def output(self, slot: int) -> Tensor:
        return self._output

    def output_counts(self, slot: int) -> tuple[Tensor, Tensor]:
        return self._counts

    def seen(self, slot: int) -> Tensor:
        return self._seen

    def admitted(self, slot: int, params: Struct) -> Admit:
        return Admit(
            slot=slot,
            choice=0,
            params=SamplingParams(seed=slot),
            chain=(params,),
            end_ids=frozenset({0}),
            prompt_ids=array("i", self._prompt.tolist()),
            output_ids=array("i", self._output.tolist()),
        )


def _logits_processor(bound: Bound, params: Struct, vocab_size: int, seconds: float) -> Iterator[str]:
    component, history = bound.component, FixedHistory(vocab_size)
    used = [component.admit(slot, params, history.admitted(slot, params)) for slot in range(max(BATCHES))]
    if not any(used):
        yield f"these parameters change nothing, so it would not be called: {_shown(params)}; give others by --params"
        return
    yield f"phase {component.phase}, parameters {_shown(params)}, {vocab_size} tokens, {NUM_OUTPUT} drawn before"
    yield from _step_table(lambda logits, uniforms, rows: component.apply(logits, rows), history, vocab_size, seconds)


def _sampler(bound: Bound, params: Struct, vocab_size: int, seconds: float) -> Iterator[str]:
    component, history = bound.component, FixedHistory(vocab_size)
    if hasattr(component, "admit"):
        for slot in range(max(BATCHES)):
            component.admit(slot, params, history.admitted(slot, params))
    yield f"parameters {_shown(params)}, {vocab_size} tokens"
    yield from _step_table(component.sample, history, vocab_size, seconds)


def _step_table(
    call: Callable[[Tensor, Tensor, Rows], Tensor], history: FixedHistory, vocab_size: int, seconds: float
) -> Iterator[str]:
    import torch

    torch.set_num_threads(1)  # Threads that wait for a core of a busy machine would be what is measured.
    generator = torch.Generator().manual_seed(1)
    yield f"{'batch':>10} {'µs a call':>12} {'µs a row':>12} {'calls':>8}"
    for batch in BATCHES:
        fresh = torch.randn(batch, vocab_size, generator=generator)
        uniforms = torch.rand(batch, generator=generator, dtype=torch.float64)
        logits = fresh.clone()

        def make_uniforms(stream: str, uniforms: Tensor = uniforms) -> Tensor:
            return uniforms

        rows = Rows(list(range(batch)), [NUM_OUTPUT] * batch, history, make_uniforms)

        def prepare(logits: Tensor = logits, fresh: Tensor = fresh) -> None:
            logits.copy_(fresh)

        def run(logits: Tensor = logits, uniforms: Tensor = uniforms, rows: Rows = rows) -> None:
            call(logits, uniforms, rows)

        with torch.inference_mode():
            yield _row(batch, *_measure(run, prepare, seconds))


def _scheduler_policy(bound: Bound, params: Struct, vocab_size: int, seconds: float) -> Iterator[str]:
    policy = bound.component
    yield "order and victim, of each candidate once; the budget is 50 µs and 1 µs a candidate"
    yield f"{'candidates':>10} {'µs a call':>12} {'µs a cand.':>12} {'calls':>8}"
    for count in CANDIDATES:
        waiting = [
            WaitingView(
                arrival=i / 7, priority=i % 3, num_tokens=1 + i * 37 % 900, num_preemptions=i % 2, tenant=f"{i % 5}"
            )
            for i in range(count)
        ]
        running = [
            RunningView(
                arrival=i / 7,
                priority=i % 3,
                num_tokens=1 + i * 37 % 900,
                num_blocks=i % 50,
                num_preemptions=0,
                parked=False,
            )
            for i in range(count)
        ]

        def run(waiting: list[WaitingView] = waiting, running: list[RunningView] = running) -> None:
            sorted([policy.order(view, 1000.0) for view in waiting])
            max([policy.victim(view) for view in running])

        yield _row(count, *_measure(run, lambda: None, seconds))


def _measure(run: Callable[[], None], prepare: Callable[[], None], seconds: float) -> tuple[float, int]:
    """(median seconds a call, calls); preparing does not count, nor does the first call."""
    prepare()
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_CALLS or time.perf_counter() < end:
        prepare()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times), len(times)


def _row(count: int, seconds: float, calls: int) -> str:
    return f"{count:>10} {seconds * 1e6:>12.1f} {seconds * 1e6 / count:>12.2f} {calls:>8}"


def _shown(params: Struct) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(params).items()) or "none"


_MEASURES: Final = {
    "logits_processor": _logits_processor,
    "sampler": _sampler,
    "scheduler_policy": _scheduler_policy,
}
