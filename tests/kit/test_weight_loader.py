"""The contract of weight loaders: what it lets pass, and what it catches."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from headrace.hooks.protocols import Artifact
from headrace.hooks.testing.contract import run
from headrace.plugins.safetensors import SafetensorsCheckpoint, SafetensorsLoader
from headrace.testing import WeightLoaderContract
from tests.kit.faults import contract_of, failures


def write(self, folder):
    generator = torch.Generator().manual_seed(1)
    tensors = {"a": torch.randn(3, 8, generator=generator), "b": torch.randn(5, generator=generator)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["Mill"]}))
    return Artifact(kind="safetensors", path=folder, name="mill"), tensors


class TestSafetensors(WeightLoaderContract):
    plugin = "safetensors"
    architecture = "Mill"
    write = write


class Good(SafetensorsLoader):
    pass


def opening(**members):
    checkpoint = type("FaultyCheckpoint", (SafetensorsCheckpoint,), members)
    return type("Faulty", (Good,), {"open": lambda self, artifact: checkpoint(artifact)})


def turned(self, name):
    return SafetensorsCheckpoint.tensor(self, name).flip(0)


class Shared(SafetensorsCheckpoint):
    def tensor(self, name):
        self.kept = getattr(self, "kept", {})
        return self.kept.setdefault(name, super().tensor(name))


def key_error(self, name):
    self.shapes[name]
    return SafetensorsCheckpoint.tensor(self, name)


class Reads(Good):
    """Looks for itself first, and believes what it finds."""

    def open(self, artifact):
        raw = (artifact.path / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        json.loads(raw[8 : 8 + length])
        return super().open(artifact)


FAULTS = [
    ("test_its_table_is_right", opening(shapes=property(lambda self: {"a": (8, 3)}, lambda self, value: None))),
    ("test_tensors_are_what_was_written", opening(tensor=turned)),
    (
        "test_tensors_are_what_was_written",
        opening(tensor=lambda self, name: SafetensorsCheckpoint.tensor(self, name).half()),
    ),
    ("test_a_tensor_is_in_memory_of_its_own", type("F", (Good,), {"open": lambda self, artifact: Shared(artifact)})),
    ("test_what_is_not_there_is_a_model_error", opening(tensor=key_error)),
    ("test_a_cut_file_is_a_model_error", Reads),
    ("test_a_damaged_file_is_a_model_error_or_another_number", Reads),
]


def test_a_good_one_keeps_every_promise():
    tried = contract_of("weight_loader", Good, write=write, architecture="Mill")
    assert set(run(tried).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("weight_loader", component, write=write), [test])
