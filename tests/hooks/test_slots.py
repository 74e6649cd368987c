import inspect

import pluggy
import pytest

from headrace.hooks.slots import PROJECT, SLOTS, Slot, hookspecs

VERSION_1 = """model_source architecture weight_loader quantizer attention tokenizer chat_template tool_parser
reasoning_parser admission scheduler_policy logits_processor sampler grammar stop executor observer auth middleware
routes command"""


def test_the_table_has_every_slot_of_version_1():
    assert sorted(SLOTS) == sorted(VERSION_1.split())


@pytest.mark.parametrize("slot", SLOTS.values(), ids=list(SLOTS))
def test_a_slot_has_a_protocol_with_a_docstring_and_members(slot):
    members = [name for name in {*vars(slot.protocol), *slot.protocol.__annotations__} if name[0] != "_"]
    assert getattr(slot.protocol, "_is_protocol", False)
    assert slot.name in inspect.getdoc(slot.protocol)
    assert members or callable(slot.protocol.__call__)


@pytest.mark.parametrize("slot", SLOTS.values(), ids=list(SLOTS))
def test_a_slot_has_a_hook_with_a_docstring_that_takes_register(slot):
    hook = getattr(hookspecs(), f"register_{slot.name}")
    assert list(inspect.signature(hook).parameters) == ["register"]
    assert hook.__doc__.startswith(slot.doc)
    assert slot.protocol.__name__ in hook.__doc__


def test_pluggy_takes_the_hooks_as_specifications():
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs())
    assert all(getattr(manager.hook, f"register_{name}").has_spec() for name in SLOTS)


def test_a_hook_is_made_for_each_row_of_the_table():
    row = Slot(name="eviction", kind="one", protocol=object, on_error="start", doc="Chooses blocks to give up.")
    assert list(vars(hookspecs([row]))) == ["register_eviction"]


def test_slots_that_widen_trust_are_opt_in():
    assert {name for name, slot in SLOTS.items() if slot.opt_in} == {"auth", "middleware", "routes", "command"}
