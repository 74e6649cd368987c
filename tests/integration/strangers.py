"""Plugins of strangers: small distributions on a path of their own, found by the real scan."""

from __future__ import annotations

from pathlib import Path

GATE = '''
"""Model source `gate:PATH`: the checkpoint at PATH, once the gate is open."""

import threading

from headrace.hooks.registry import plugin
from headrace.plugins.sources import FileSource

gate = threading.Event()


class Gate(FileSource):
    def resolve(self, reference, progress):
        gate.wait(60)
        return super().resolve(reference, progress)


@plugin
def register_model_source(register):
    register("gate", lambda context, options: Gate())
'''

STUCK = '''
"""Logits processor `stuck`: hangs in the middle of every answer."""

import threading

from msgspec import Struct

from headrace.hooks.registry import plugin

release = threading.Event()


class Params(Struct, forbid_unknown_fields=True):
    after: int = 3


class Stuck:
    phase = "bias"

    def __init__(self, context, options):
        pass

    def admit(self, slot, params, admitted):
        self.after = params.after
        return True

    def apply(self, logits, rows):
        if max(rows.num_outputs) >= self.after:
            release.wait(60)
        return logits


@plugin
def register_logits_processor(register):
    register("stuck", Stuck, params=Params)
'''

NAUGHTY = '''
"""Logits processor `naughty`: after three tokens it does what a request's *mode* says."""

import math

import torch
from msgspec import Struct

from headrace.hooks.registry import plugin


class Params(Struct, forbid_unknown_fields=True):
    mode: str = "good"


class Naughty:
    phase = "bias"

    def __init__(self, context, options):
        self.modes = {}

    def admit(self, slot, params, admitted):
        self.modes[slot] = params.mode
        if params.mode == "refuse":
            raise RuntimeError("on purpose")
        return params.mode != "good"

    def apply(self, logits, rows):
        if rows.num_outputs[0] < 3:
            return logits
        match self.modes[rows.slots[0]]:
            case "raise":
                raise RuntimeError("on purpose")
            case "nan":
                return logits.fill_(math.nan)
            case "shape":
                return torch.zeros(3)


@plugin
def register_logits_processor(register):
    register("naughty", Naughty, params=Params)
'''

BREAKER = '''
"""Logits processor `breaker`: after three tokens it breaks as a request's *mode* says, again at each token."""

import math
import time

import torch
from msgspec import Struct

from headrace.hooks.registry import plugin

SLOW_S = 0.06


class Params(Struct, forbid_unknown_fields=True):
    mode: str = "good"


class Breaker:
    phase = "penalty"

    def __init__(self, context, options):
        self.modes = {}
        self.kept = []

    def admit(self, slot, params, admitted):
        self.modes[slot] = params.mode
        return params.mode != "good"

    def apply(self, logits, rows):
        if rows.num_outputs[0] < 3:
            return logits
        return getattr(self, self.modes[rows.slots[0]])(logits, rows)

    def raises(self, logits, rows):
        logits.fill_(math.nan)
        raise RuntimeError("on purpose")

    def nan(self, logits, rows):
        return logits.fill_(math.nan)

    def shape(self, logits, rows):
        return logits[:, :3]

    def dtype(self, logits, rows):
        return logits.double()

    def slow(self, logits, rows):
        time.sleep(SLOW_S)
        return logits

    def thief(self, logits, rows):
        for kept in self.kept:
            kept.fill_(1e9)
        self.kept.append(logits)
        for slot in range(64):
            try:
                rows.history.output(slot).fill_(1)
            except ValueError:
                pass
        shape = logits.shape
        logits.resize_(64, shape[1]).fill_(1e9)
        rows.slots.clear()
        return logits.resize_(shape)


@plugin
def register_logits_processor(register):
    register("breaker", Breaker, params=Params)
'''

CLUMSY = '''
"""Attention `clumsy`: fails when a second prompt comes."""

from headrace.hooks.registry import plugin
from headrace.plugins.sdpa import Sdpa


class Clumsy(Sdpa):
    prompts = 0

    def plan(self, batch):
        self.prompts += len(batch.seq_lens) > batch.num_decodes
        if self.prompts == 2:
            raise RuntimeError("tripped on purpose")
        return super().plan(batch)


@plugin
def register_attention(register):
    register("clumsy", lambda context, options: Clumsy())
'''


ECHO = '''
"""Executors: `echo` draws the prompt again and breaks as its option *mode* says; others run the model, or say so."""

import torch
import trio
from msgspec import Struct

from headrace.hooks.messages import Admit, Release, StepResult
from headrace.hooks.registry import plugin

contexts = []
ended = []


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    mode: str = "good"
    num_blocks: int | None = None


class Echo:
    """Gives logits to the line's own sampling."""

    def __init__(self, context, options):
        contexts.append(context)
        self.mode = options.mode
        self.line = context.executor
        self.prompts = {}
        if options.num_blocks is not None:
            self.num_blocks = options.num_blocks
        if self.mode == "build":
            raise RuntimeError("broken on purpose")

    def __enter__(self):
        if self.mode == "enter":
            raise RuntimeError("broken on purpose")
        return self

    def __exit__(self, *exc_info):
        ended.append(self)
        if self.mode == "exit":
            raise RuntimeError("broken on purpose")

    def submit(self, step):
        if step.index == 3 and self.mode == "submit":
            raise RuntimeError("broken on purpose")
        if step.index == 3 and self.mode == "handle":
            return None
        return Handle(self, step, self.run(step))

    def run(self, step):
        self.line.sampling.begin(step)
        for op in step.slot_ops:
            if isinstance(op, Admit):
                self.prompts[op.slot] = op.prompt_ids
            elif isinstance(op, Release):
                del self.prompts[op.slot]
        logits = torch.zeros(len(step.sample_rows) + len(step.score_rows), self.line.vocab_size)
        for row, (slot, position) in enumerate(zip(step.sample_slots, step.sample_positions)):
            prompt = self.prompts[slot]
            logits[row, prompt[position % len(prompt)]] = 50
        return self.line.sampling.draw(step, logits, forward_s=0.0)


class Handle:
    def __init__(self, echo, step, value):
        self.mode = echo.mode if step.index == 3 else "good"
        self.value = value

    async def result(self):
        await trio.lowlevel.checkpoint()
        match self.mode:
            case "result":
                raise RuntimeError("broken on purpose")
            case "hang":
                await trio.sleep_forever()
            case "words":
                return "words"
            case "few":
                return StepResult(token_ids=[], logprobs={}, errors={}, forward_s=0.0, sample_s=0.0)
            case "large":
                return StepResult(token_ids=[10**6], logprobs={}, errors={}, forward_s=0.0, sample_s=0.0)
            case "neither":
                return StepResult(token_ids=[-1], logprobs={}, errors={}, forward_s=0.0, sample_s=0.0)
        return self.value


def around(context, options):
    return context.executor.on_thread(context.executor.load())


def lazy(context, options):
    return context.executor.on_thread(print)


def twice(context, options):
    context.executor.load()
    return around(context, options)


def thief(context, options):
    return around(context, options)


around.uses_model = lazy.uses_model = twice.uses_model = True


@plugin
def register_executor(register):
    register("echo", Echo, config=Options)
    for each in (around, lazy, twice, thief):
        register(each.__name__, each)
    register("lost", "nowhere_at_all:Echo")
'''


def install(folder: Path, name: str, source: str) -> None:
    """Put a plugin into *folder* as pip would: its module, and the metadata with its entry point."""
    (folder / f"stranger_{name}.py").write_text(source, "utf-8")
    info = folder / f"stranger_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stranger-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[headrace.plugins]\n{name} = stranger_{name}\n")
