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


def install(folder: Path, name: str, source: str) -> None:
    """Put a plugin into *folder* as pip would: its module, and the metadata with its entry point."""
    (folder / f"stranger_{name}.py").write_text(source, "utf-8")
    info = folder / f"stranger_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stranger-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[headrace.plugins]\n{name} = stranger_{name}\n")
