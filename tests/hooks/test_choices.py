"""Every setting that names components, and all that is wrong with what it names."""

import msgspec
import pytest

from headrace.hooks.choices import choices, examine, idle, keys
from headrace.hooks.config import Settings
from headrace.hooks.origins import Where
from headrace.hooks.registry import Registry
from headrace.hooks.slots import SLOTS

PLUGIN = """
from msgspec import Struct
class Options(Struct, forbid_unknown_fields=True):
    weight: int = 1
class Params(Struct, forbid_unknown_fields=True):
    a: int = 1
@plugin
def register_scheduler_policy(register): register("fair", print, config=Options)
@plugin
def register_logits_processor(register): register("top-a", print, params=Params)
@plugin
def register_sampler(register): register("plain", print)
"""


@pytest.fixture
def registry(site):
    site.install("acme", acme=PLUGIN)
    return Registry.discover(entry_points=site.entry_points(), environ={})


def values(**sections):
    empty = msgspec.to_builtins(Settings(), enc_hook=int)
    for key in keys():
        section, _, name = key.rpartition(".")
        (empty[section] if section else empty).pop(name)
    return {name: {**empty[name], **sections.get(name, {})} for name in ("model", "line", "sampling", "server")}


def problems(registry, **sections):
    found = []
    examine(registry, values(**sections), Where(()), found)
    return [str(problem) for problem in found]


def test_every_setting_that_names_components_belongs_to_a_slot():
    assert set(keys().values()) <= set(SLOTS)
    assert {"line.policy": "scheduler_policy", "observers": "observer", "server.auth": "auth"}.items() <= keys().items()


def test_the_built_in_choices_are_found_at_their_places():
    found = {
        ".".join(choice.path): (choice.slot, choice.use["use"])
        for choice in choices(msgspec.to_builtins(Settings(), enc_hook=int))
    }
    assert found["model.attention"] == ("attention", Settings().model.attention.use)
    assert found["sampling.phases.4.processors.1"] == ("logits_processor", "top-p")


def test_what_is_right_gives_no_problem(registry):
    line = {"policy": {"use": "fair", "options": {"weight": 3}}}
    sampling = {"extra_processors": ["acme/top-a"], "sampler": "plain", "locked": ["logits.top-a.a"]}
    assert problems(registry, line=line, sampling=sampling) == []


def test_all_wrong_choices_are_told_at_once(registry):
    line = {"policy": {"use": "fair", "options": {"wait": 3}}}
    sampling = {
        "extra_processors": ["top-b", "top-a"],
        "sampler": {"use": "plain", "options": {"x": 1}},
        "locked": ["logits.top-a.b"],
    }
    found = problems(registry, line=line, sampling=sampling)
    assert len(found) == 4
    assert "line.policy.options.wait: unknown; did you mean weight?" in found
    assert (
        "sampling.extra_processors.0: no logits processor called 'top-b'; did you mean top-a? (installed: top-a)"
        in found
    )
    assert "sampling.sampler.options: plain takes no options, got x" in found
    assert "sampling.locked.0: top-a has no 'b' (fields: a)" in found


EXECUTORS = """
class Foreign:
    def __init__(self, context, options): pass
class Own(Foreign):
    uses_model = True
@plugin
def register_executor(register):
    register("foreign", Foreign)
    register("own", Own)
    register("lost", "nowhere_at_all:Own")
"""


@pytest.mark.parametrize(
    ("use", "set_", "expected"),
    [
        ("foreign", {}, []),
        ("foreign", {"model": {"quantizer": "auto", "threads": None}}, []),
        ("foreign", {"model": {"quantizer": {"use": "auto", "options": {}}}}, []),
        ("foreign", {"model": {"threads": 2}}, ["model.threads"]),
        ("foreign", {"model": {"quantizer": {"use": "auto", "options": {"a": 1}}}}, ["model.quantizer"]),
        ("foreign", {"model": {"attention": "sdpa"}, "line": {"kv_memory": 1}}, ["model.attention", "line.kv_memory"]),
        ("own", {"model": {"threads": 2, "attention": "sdpa"}}, []),
    ],
)
def test_settings_of_the_model_mean_nothing_to_an_executor_without_it(site, use, set_, expected):
    site.install("acme", acme=EXECUTORS)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    executor = registry.select("executor", use)
    found = idle({**msgspec.to_builtins(Settings(), enc_hook=int), **filled(set_)}, executor, lambda key: Where((key,)))
    assert [str(problem).partition(":")[0] for problem in found] == expected


def filled(sections):
    defaults = msgspec.to_builtins(Settings(), enc_hook=int)
    return {name: {**defaults[name], **changes} for name, changes in sections.items()}


def test_an_executor_that_cannot_be_imported_is_told_with_its_place(site):
    site.install("acme", acme=EXECUTORS)
    registry = Registry.discover(entry_points=site.entry_points(), environ={})
    (problem,) = problems(registry, line={"executor": "lost"})
    assert problem.startswith("line.executor: plugin acme (acme 1.0): executor lost could not be built: ModuleNotFound")


def test_nothing_needs_to_fill_a_slot_that_is_switched_off(registry):
    assert problems(registry, server={"auth": "none"}) == []


@pytest.mark.parametrize("use", [3, {"use": 3}, {"use": "fair", "options": 3}, [["x"]], None])
def test_what_has_the_wrong_shape_is_left_to_others(registry, use):
    found = []
    examine(registry, values(line={"policy": use}), Where(()), found)
    assert all("policy" not in str(problem) or "called 'x'" in str(problem) for problem in found)
