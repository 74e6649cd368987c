"""From an opened checkpoint to a model: what is checked, what is reported, and what is loaded only when needed."""

import subprocess
import sys

import gguf
import pytest
import torch

from headrace.core.model.load import load
from headrace.hooks.errors import ModelError
from headrace.hooks.registry import Registry
from headrace.hooks.slots import SLOTS
from headrace.plugins.llama import Llama
from headrace.plugins.sdpa import Sdpa
from headrace.plugins.unquantized import Unquantized
from tests.model.tiny import finish, open_checkpoint

MODULES = ("gguf", "llama", "safetensors", "sdpa", "sources", "unquantized")


def load_tiny(path, *, attention=None, progress=None):
    checkpoint = open_checkpoint(path)
    return load(
        checkpoint.artifact,
        checkpoint,
        Llama(),
        Unquantized(),
        attention or Sdpa(),
        num_blocks=4,
        block_size=16,
        **({"progress": progress} if progress else {}),
    )


def rewritten(source, path, change):
    """A copy of the GGUF file *source* whose tensors went through `change(name, array)`; None leaves one out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        array = change(tensor.name, tensor.data.copy())
        if array is not None:
            writer.add_tensor(tensor.name, array)
    finish(writer)
    return path


def test_progress_goes_from_the_first_weight_to_all(tiny_gguf):
    calls = []

    load_tiny(tiny_gguf, progress=lambda *call: calls.append(call))

    names, done, totals = zip(*calls, strict=True)
    assert set(names) == {"tiny"}
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}


def test_a_weight_of_another_shape_is_named(tiny_gguf, tmp_path):
    path = rewritten(tiny_gguf, tmp_path / "x.gguf", lambda name, a: a[:-1] if name == "blk.1.ffn_up.weight" else a)

    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight must be \[80, 48\], found \[79, 48\]"):
        load_tiny(path)


def test_missing_weights_are_named_and_counted(tiny_gguf, tmp_path):
    path = rewritten(tiny_gguf, tmp_path / "x.gguf", lambda name, a: None if "blk.1" in name else a)

    with pytest.raises(ModelError, match=r"blk\.1\.attn_norm\.weight must be \[48\], there is none; .* and 5 more"):
        load_tiny(path)


def test_an_attention_that_cannot_run_the_model_is_refused_with_its_reason(tiny_gguf):
    class EvenHeadsOnly(Sdpa):
        def supports(self, *, head_dim, **rest):
            return f"head_dim must be 128, got {head_dim}"

    with pytest.raises(ModelError, match="EvenHeadsOnly cannot run this model: head_dim must be 128, got 16"):
        load_tiny(tiny_gguf, attention=EvenHeadsOnly())


def test_the_cache_has_the_shape_that_was_asked_for(tiny_gguf):
    model = load_tiny(tiny_gguf)

    assert model.store.pool.shape == (4, 2, 2, 2, 16, 16)
    assert model.vocab_size == 99
    assert model.store.pool.dtype == torch.float32


def test_each_module_registers_what_it_offers_and_loads_without_torch():
    program = f"""
import importlib, sys
from headrace.hooks.registry import Registry
from headrace.hooks.slots import SLOTS
registry = Registry()
for name in {MODULES!r}:
    registry.add(importlib.import_module("headrace.plugins." + name), name)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_components_are_registered_under_their_names():
    import importlib

    registry = Registry()
    for name in MODULES:
        registry.add(importlib.import_module(f"headrace.plugins.{name}"), name)

    offered = {(slot, component.name) for slot in SLOTS for component in registry.offered(slot)}
    assert offered == {
        ("model_source", "pkg"),
        ("model_source", "file"),
        ("weight_loader", "gguf"),
        ("weight_loader", "safetensors"),
        ("architecture", "llama"),
        ("architecture", "LlamaForCausalLM"),
        ("attention", "sdpa"),
        ("quantizer", "none"),
    }
