"""Whether this machine and this configuration can serve, found out in about ten seconds.

Each check gives findings; one that is not `ok` is a problem somebody should look at.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from ..hooks.components import PluginInfo
from ..hooks.errors import HeadraceError
from ..hooks.messages import TextPrompt
from ..hooks.registry import Registry

if TYPE_CHECKING:
    from ..core.engine import Engine, Progress
    from ..core.local import LLM
    from ..hooks.config import Loaded

PACKAGES: Final = (
    "headrace",
    "torch",
    "trio",
    "hypercorn",
    "starlette",
    "msgspec",
    "tokenizers",
    "safetensors",
    "gguf",
)
# Shorter than a block, so that no answer depends on what the prefix cache holds.
PROMPT: Final = "The capital of France is"
NUM_TOKENS: Final = 24
SELF_TEST_S: Final = 10.0
LEAST_TOKENS_A_SECOND: Final = 1.0
SPARE_FILES: Final = 64


class Finding(Struct, frozen=True, kw_only=True):
    """One line of the report."""

    what: str
    text: str
    ok: bool = True

    def __str__(self) -> str:
        return f"{' ' if self.ok else '!'} {self.what:<9} " + self.text.replace("\n", "\n" + " " * 12)


def examine(loaded: Loaded, *, self_test_s: float = SELF_TEST_S, progress: Progress | None = None) -> Iterator[Finding]:
    """All findings, as they come.

    Args:
        self_test_s: how long to try the model; 0: not at all.
    """
    yield from machine()
    yield from plugins(find_plugins(loaded))
    yield files(loaded.settings.server.max_connections)
    memory = plan(loaded)
    yield memory
    if self_test_s > 0 and memory.ok:
        from ..core.engine import Engine

        yield from self_test(Engine(loaded.settings, where=loaded.where), self_test_s, progress)


def machine() -> Iterator[Finding]:
    """Versions, threads, and what steps run on."""
    import torch

    yield Finding(what="python", text=f"{platform.python_version()} on {platform.platform()}")
    yield Finding(what="versions", text=", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    cores = len(os.sched_getaffinity(0))
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding(
        what="torch",
        text=f"{torch.get_num_threads()} threads on {cores} cores, instruction set {capability}",
        ok=torch.get_num_threads() <= cores,
    )
    yield native()


def native() -> Finding:
    """Whether steps run in native kernels, and why not."""
    if find_spec("headrace.core.kernels.native") is None:
        return Finding(what="native", text="no: this build has no native kernels; torch runs one operation at a time")
    return Finding(what="native", text="yes")


def plugins(found: Iterable[PluginInfo]) -> Iterator[Finding]:
    """How many plugins are loaded, and each one that is not."""
    infos = list(found)
    loaded = [info for info in infos if info.state in ("loaded", "selected")]
    yield Finding(what="plugins", text=f"{len(loaded)} of {len(infos)} loaded")
    for info in infos:
        if info not in loaded:
            yield Finding(what=f"plugin {info}", text=f"{info.state}: {info.reason}", ok=info.state == "skipped")


def find_plugins(loaded: Loaded) -> tuple[PluginInfo, ...]:
    """Every installed plugin, under this configuration.

    Raises:
        ConfigError: it names plugins that are not there.
    """
    chosen = loaded.settings.plugins
    where = loaded.where("plugins")
    return Registry.discover(disable=chosen.disable, allow=chosen.allow, strict=chosen.strict, where=where).report()


def files(max_connections: int) -> Finding:
    """Whether the process may open as many files as it may have connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= max_connections + SPARE_FILES
    advice = "" if enough else f"; raise `ulimit -n` to {max_connections + SPARE_FILES} or lower it"
    return Finding(
        what="files", text=f"{soft} may be open, server.max_connections is {max_connections}{advice}", ok=enough
    )


def plan(loaded: Loaded) -> Finding:
    """The memory plan of the model."""
    from ..core.engine import plan_memory

    try:
        return Finding(what="memory", text=plan_memory(loaded.settings, loaded.where))
    except HeadraceError as error:
        return Finding(what="memory", text=str(error), ok=False)


def self_test(engine: Engine, budget_s: float, progress: Progress | None = None) -> Iterator[Finding]:
    """Load the model, ask it the same greedy question over and over, and see that it gives back what it took."""
    from ..core.local import run

    started = time.monotonic()
    try:
        with run(engine, progress) as llm:
            yield Finding(what="load", text=f"{time.monotonic() - started:.1f} s")
            yield from _answers(llm, budget_s)
    except HeadraceError as error:
        yield Finding(what="self test", text=str(error), ok=False)
        return
    # The line has ended: whatever is held now would be held for ever.
    held = engine.statistics()
    yield Finding(
        what="returned",
        text=f"{held.blocks_used} blocks and {held.slots_used} places are held after the last answer",
        ok=held.blocks_used == held.slots_used == 0,
    )


def _answers(llm: LLM, budget_s: float) -> Iterator[Finding]:
    """Ask at least twice, for the first answer warms up and the second must be the same."""
    end = time.monotonic() + budget_s
    texts: list[str] = []
    best = 0.0
    while len(texts) < 2 or time.monotonic() < end:
        text, rate = _ask(llm)
        texts.append(text)
        best = max(best, rate)
    same = len(set(texts)) == 1
    yield Finding(what="answer", text=f"{PROMPT!r} goes on {texts[0]!r}", ok=bool(texts[0].strip()))
    yield Finding(
        what="repeats", text=f"{len(texts)} greedy answers, {'all the same' if same else 'not all the same'}", ok=same
    )
    yield Finding(what="speed", text=f"{best:.1f} tokens/s for one stream", ok=best >= LEAST_TOKENS_A_SECOND)


def _ask(llm: LLM) -> tuple[str, float]:
    """(answer, tokens a second after the first)."""
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    text, num_tokens, first_at = "", 0, None
    for delta in llm.deltas(TextPrompt(text=PROMPT), params):
        first_at = first_at or time.monotonic()
        text += delta.text
        num_tokens = delta.usage.completion if delta.usage else num_tokens
    seconds = time.monotonic() - (first_at or time.monotonic())
    return text, max(0, num_tokens - 1) / max(seconds, 1e-6)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
