"""The contract of logits processors: what it lets pass, and what it catches."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec import Struct

from headrace.hooks.testing.contract import run
from headrace.testing import LogitsProcessorContract
from tests.kit.faults import contract_of, failures

BUILT_IN = {
    "logit-bias": [{"bias": {3: 5.0, 60: -100.0}}],
    "repetition": [{"penalty": 1.5}, {"penalty": 0.7}, {}],
    "presence-frequency": [{"presence": 0.5, "frequency": 1.0}],
    "min-tokens": [{"count": 5}, {}],
    "temperature": [{"value": 0.3}, {"value": 2.0}],
    "top-k": [{"k": 3}, {"k": 1}, {}],
    "top-p": [{"p": 0.5}, {"p": 0.95}],
    "min-p": [{"p": 0.1}, {"p": 0.9}],
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_keeps_the_contract(name):
    tried = type("T", (LogitsProcessorContract,), {"plugin": name, "name": name, "params": BUILT_IN[name]})
    assert failures(tried) == {}


class Params(Struct, frozen=True, forbid_unknown_fields=True):
    scale: float = 1.0


class Good:
    """Multiplies logits by a number of the request's, a little less for each token drawn so far."""

    phase = "penalty"
    speculative = True

    def __init__(self):
        self.scale = torch.ones(6)
        self.slots = set()

    def admit(self, slot, params, admitted):
        self.scale[slot] = params.scale
        self.slots.add(slot)
        return params.scale != 1

    def apply(self, logits, rows):
        fall = torch.tensor([1 / (1 + number) for number in rows.num_outputs])
        return logits.mul_((self.scale[rows.slots] * (1 + fall))[:, None])


def faulty(test, **members):
    return pytest.param(test, type("Faulty", (Good,), members), id=test)


class CountsCalls(Good):
    def admit(self, slot, params, admitted):
        self.calls = {**getattr(self, "calls", {}), slot: 0}
        return super().admit(slot, params, admitted)

    def apply(self, logits, rows):
        for slot in rows.slots:
            self.calls[slot] += 1
        return logits * torch.tensor([[1.0 + self.calls[slot]] for slot in rows.slots])


class Remembers(Good):
    def admit(self, slot, params, admitted):
        self.scale[slot] = max(float(self.scale[slot]), params.scale)
        return True


class ReadsAll(Good):
    def apply(self, logits, rows):
        for slot in self.slots:
            rows.history.output(slot)
        return super().apply(logits, rows)


class ReadsHistory(Good):
    def apply(self, logits, rows):
        for slot in rows.slots:
            rows.history.seen(slot)
        return super().apply(logits, rows)


def to_base(self, logits, rows):
    if logits._base is not None:
        logits._base[0] = 0
    return logits


def by_place(self, logits, rows):
    return logits * torch.arange(1, len(logits) + 1)[:, None]


FAULTS = [
    faulty("test_it_declares_a_phase", phase="later"),
    faulty("test_check_refuses_with_bad_request_only", check=lambda self, params: params.missing),
    faulty("test_admit_says_whether_it_is_needed", admit=lambda self, slot, params, admitted: None),
    faulty("test_it_gives_back_rows_of_the_same_kind", apply=lambda self, logits, rows: logits.double()),
    faulty("test_a_row_is_the_same_alone_and_in_company", apply=lambda self, logits, rows: logits - logits.amax()),
    faulty("test_the_order_of_rows_does_not_matter", apply=by_place),
    pytest.param("test_a_new_owner_finds_nothing_of_the_last_one", Remembers, id="remembers"),
    pytest.param("test_the_others_go_on_when_one_has_finished", ReadsAll, id="reads all"),
    pytest.param("test_a_preempted_request_goes_on_as_if_nothing_had_happened", CountsCalls, id="counts calls"),
    pytest.param("test_apply_alone_changes_nothing_for_the_next_call", CountsCalls, id="counts calls in place"),
    faulty("test_it_touches_no_rows_but_its_own", apply=to_base),
    faulty("test_it_touches_no_rows_but_its_own", apply=lambda self, logits, rows: (rows.slots.reverse(), logits)[1]),
    faulty(
        "test_every_row_keeps_a_largest_logit_that_is_finite",
        apply=lambda self, logits, rows: logits.masked_fill(logits < 20, -math.inf),
    ),
    faulty("test_extreme_rows_stay_drawable", apply=lambda self, logits, rows: logits / logits.var(-1, keepdim=True)),
    faulty("test_what_is_ruled_out_stays_ruled_out", apply=lambda self, logits, rows: logits.clamp(min=-100)),
    pytest.param("test_guessed_rows_are_served_without_the_history", ReadsHistory, id="reads history"),
]
PARAMS = [{"scale": 0.5}, {"scale": 3.0}, {}]


def test_a_good_one_keeps_every_promise():
    results = run(made(Good))
    assert set(results.values()) == {None}


def made(component):
    return contract_of("logits_processor", component, struct=Params, params=PARAMS)


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(made(component), [test])
