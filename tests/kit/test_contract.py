"""What all contracts share: how a component is found, what its structs must be, and how light the kit is."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, metadata
from typing import Annotated
from unittest import SkipTest

import pytest
from msgspec import Meta, Struct

import headrace.testing
from headrace.hooks.slots import SLOTS
from headrace.hooks.testing.catalog import NAMES, class_name, contract
from headrace.hooks.testing.contract import Broken, promises_of, run
from headrace.testing import LogitsProcessorContract
from tests.kit import test_logits_processor as processors
from tests.kit.faults import contract_of, failures, plugin_of

pytest_plugins = ["pytester"]


def test_every_slot_has_a_contract_under_its_name():
    assert set(NAMES) == {class_name(slot) for slot in SLOTS}
    for name, slot in NAMES.items():
        assert getattr(headrace.testing, name) is contract(slot)
        assert contract(slot).slot == slot
        assert name in headrace.testing.__all__


def test_all_public_names_are_there():
    assert all(hasattr(headrace.testing, name) for name in headrace.testing.__all__)


@pytest.mark.parametrize("slot", SLOTS)
def test_each_promise_of_a_contract_has_a_planted_fault(slot):
    """Read from the tests beside this file, by the promise's name."""
    name = {"tool_parser": "parsers", "reasoning_parser": "parsers"}.get(slot, slot)
    module = __import__(f"tests.kit.test_{name}", fromlist=["FAULTS"])
    source = inspect.getsource(module)
    promises = set(promises_of(contract(slot))) - set(promises_of(contract(slot).__mro__[-2]))
    shared = {"test_its_parameters_are_as_a_request_has_them"}
    assert [promise for promise in sorted(promises - shared) if promise not in source] == []


def test_the_kit_and_its_pytest_plugin_load_neither_torch_nor_hypothesis():
    heavy = "'torch', 'hypothesis', 'msgspec', 'trio', 'pluggy'"
    loads = "import sys, headrace.testing, headrace.hooks.testing.pytest_plugin"
    program = f"{loads}\nsys.exit(any(name in sys.modules for name in ({heavy})))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_pytest_plugin_is_an_entry_point():
    (entry,) = metadata.entry_points(group="pytest11", name="headrace")
    assert entry.value == "headrace.hooks.testing.pytest_plugin"


def test_a_plugin_is_found_by_entry_point_module_or_name_of_a_module():
    for plugin in ("top-k", "headrace.plugins.top_k", import_module("headrace.plugins.top_k")):
        assert type("T", (LogitsProcessorContract,), {"plugin": plugin})().entry().name == "top-k"


@pytest.mark.parametrize(
    ("plugin", "name", "reason"),
    [
        ("", "", "set it in the class"),
        ("no_such_module", "", "pip install -e"),
        ("top-k", "top-z", "called 'top-z', it offers top-k"),
        ("categorical", "", "it offers nothing"),
    ],
)
def test_a_component_that_is_not_there_is_said_to_be(plugin, name, reason):
    with pytest.raises(Broken, match=reason):
        type("T", (LogitsProcessorContract,), {"plugin": plugin, "name": name})().entry()


def test_an_entry_found_for_one_class_is_not_that_of_a_class_below_it():
    one = type("One", (LogitsProcessorContract,), {"plugin": "top-k"})
    assert one().entry().name == "top-k"
    assert type("Other", (one,), {"plugin": "top-p"})().entry().name == "top-p"


class Inner(Struct, frozen=True):
    value: int = 1


class Outer(Struct, frozen=True, forbid_unknown_fields=True):
    inner: tuple[Inner, ...] = ()


class Beyond(Struct, frozen=True, forbid_unknown_fields=True):
    value: Annotated[int, Meta(ge=1)] = 0


class Required(Struct, frozen=True, forbid_unknown_fields=True):
    value: int


class Loose(Struct, frozen=True):
    value: int = 1


@pytest.mark.parametrize(
    ("what", "struct", "test"),
    [
        ("config", Outer, "test_its_structs_refuse_unknown_fields"),
        ("params", Outer, "test_its_structs_refuse_unknown_fields"),
        ("config", Loose, "test_its_structs_refuse_unknown_fields"),
        ("params", Loose, "test_it_is_registered_and_can_be_built"),
        ("params", Required, "test_it_is_registered_and_can_be_built"),
        ("params", Beyond, "test_its_parameters_have_defaults_within_their_limits"),
    ],
)
def test_a_struct_that_may_not_be_registered_is_caught(what, struct, test):
    tried = contract_of("observer", object)
    tried.plugin = plugin_of("observer", lambda context, options: processors.Good(), **{what: struct})
    assert test in failures(tried, [test])


def test_a_component_that_lacks_a_method_is_caught():
    assert "test_it_is_registered_and_can_be_built" in failures(contract_of("observer", object))


def test_parameters_beyond_their_limits_are_caught():
    tried = contract_of("logits_processor", processors.Good, struct=processors.Params, params=[{"scale": "x"}])
    assert "test_its_parameters_are_as_a_request_has_them" in failures(tried)


def test_what_was_not_tried_is_said_to_be():
    results = run(contract_of("logits_processor", type("Slow", (processors.Good,), {"speculative": False})))
    skipped = [name for name, error in results.items() if isinstance(error, SkipTest)]
    assert skipped == ["test_guessed_rows_are_served_without_the_history"]


def test_pytest_collects_a_contract_and_takes_the_number_of_examples(pytester):
    pytester.makepyfile(
        """
        from headrace.testing import StopContract
        import headrace

        class Never:
            def watch(self, params):
                return None

        class Plugin:
            @staticmethod
            @headrace.plugin
            def register_stop(register):
                register("never", lambda context, options: Never())

        class TestNever(StopContract):
            plugin = Plugin

        def test_examples():
            assert TestNever.examples == 3
        """
    )
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--headrace-examples=3")
    done.assert_outcomes(passed=9, skipped=2)
