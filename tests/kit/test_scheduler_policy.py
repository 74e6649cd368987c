"""The contract of scheduler policies: what it lets pass, and what it catches."""

from __future__ import annotations

from itertools import count

import pytest

from headrace.plugins.fcfs import FirstComeFirstServed as Good
from headrace.testing import SchedulerPolicyContract
from tests.kit.faults import contract_of, failures


class TestFcfs(SchedulerPolicyContract):
    plugin = "fcfs"


class Ageing(Good):
    """A step of priority is worth a minute."""

    def order(self, waiting, now):
        return (waiting.priority * 60 + waiting.arrival, waiting.arrival)

    def victim(self, running):
        return (running.priority * 60 + running.arrival, running.arrival)


class Numbers(Good):
    def __init__(self):
        self.numbers = count()

    def order(self, waiting, now):
        return (waiting.priority, next(self.numbers))


def order(key):
    return type("Faulty", (Good,), {"order": lambda self, waiting, now: key(waiting, now)})


def victim(key):
    return type("Faulty", (Good,), {"victim": lambda self, running: key(running)})


def mixed(running):
    return (str(running.num_tokens),) if running.parked else (running.num_tokens,)


FAULTS = [
    ("test_its_keys_are_tuples_without_nan", order(lambda view, now: view.arrival)),
    ("test_its_keys_are_tuples_without_nan", victim(lambda view: (float("nan"), view.arrival))),
    ("test_its_keys_can_all_be_compared", victim(mixed)),
    ("test_its_keys_can_all_be_compared", order(lambda view, now: (view.tenant or None, view.arrival))),
    ("test_it_is_a_pure_function_of_what_it_sees", Numbers),
    ("test_waiting_does_not_change_the_order", order(lambda view, now: (view.priority * (now - view.arrival),))),
    ("test_nobody_starves", order(lambda view, now: (-view.arrival,))),
    ("test_nobody_starves", order(lambda view, now: (view.num_tokens, view.arrival))),
    ("test_nobody_starves", order(lambda view, now: (-view.num_tokens, view.arrival))),
    ("test_nobody_starves", order(lambda view, now: (view.tenant == "", view.arrival))),
    ("test_nobody_starves", order(lambda view, now: (-view.num_preemptions, view.arrival))),
    ("test_the_first_in_line_is_not_the_first_to_leave", victim(lambda view: (-view.arrival,))),
]


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("scheduler_policy", component), [test])


def test_priorities_that_nobody_outgrows_starve_the_rest():
    test = "test_nobody_starves"
    assert test in failures(contract_of("scheduler_policy", Good, priorities=(0, 2)), [test])
    assert failures(contract_of("scheduler_policy", Ageing, priorities=(0, 2))) == {}
