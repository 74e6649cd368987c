"""The contract of observers: what it lets pass, and what it catches."""

from __future__ import annotations

import time

import msgspec
import pytest

from headrace.hooks.protocols import RequestEnded, StepDone
from headrace.hooks.testing.contract import run
from tests.kit.faults import contract_of, failures


class Good:
    """Counts tokens."""

    def __init__(self):
        self.tokens = 0

    def on(self, event):
        if isinstance(event, RequestEnded):
            self.tokens += event.num_output_tokens


class Keeps(Good):
    def __init__(self):
        self.events = []

    def on(self, event):
        self.events.append(event)
        for _ in self.events:
            pass


def observing(on):
    return type("Faulty", (Good,), {"on": on})


def divide(self, event):
    if isinstance(event, RequestEnded):
        event.wall_s / event.num_output_tokens


def known(self, event):
    {"RequestEnded": 1, "StepDone": 2, "TokensDelivered": 3}[type(event).__name__]


def change(self, event):
    if isinstance(event, RequestEnded):
        event.states.clear()
    elif isinstance(event, StepDone):
        msgspec.structs.force_setattr(event, "index", -1)


def sleep(self, event):
    time.sleep(0)


def work(self, event):
    for _ in range(1000):
        pass


async def wait(self, event):
    pass


FAULTS = [
    ("test_it_takes_every_kind_of_event", observing(divide)),
    ("test_it_takes_every_kind_of_event", observing(lambda self, event: True)),
    ("test_it_tolerates_events_it_does_not_know", observing(known)),
    ("test_it_changes_no_event", observing(change)),
    ("test_an_event_costs_little", observing(sleep)),
    ("test_an_event_costs_little", observing(work)),
    ("test_an_event_costs_no_more_after_many", Keeps),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("observer", Good)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("observer", component), [test])


def test_an_observer_that_must_be_awaited_is_caught():
    test = "test_it_tolerates_events_it_does_not_know"
    assert test in failures(contract_of("observer", observing(wait)), [test])
