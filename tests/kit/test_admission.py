"""The contract of admission: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest
import trio

from headrace.hooks.errors import BadRequest, Overloaded
from headrace.hooks.testing.contract import run
from tests.kit.faults import contract_of, failures


class Good:
    """So many at once."""

    limit = 20

    def __init__(self):
        self.inside = set()

    async def admit(self, request, load):
        if len(self.inside) >= self.limit:
            raise Overloaded("full", retry_after_s=1.0)
        self.inside.add(request.id)

    def release(self, request):
        self.inside.discard(request.id)


def admitting(admit):
    return type("Faulty", (Good,), {"admit": admit})


async def refuse_wrongly(self, request, load):
    if load.num_waiting:
        raise BadRequest("full")


async def say_no(self, request, load):
    return load.num_waiting == 0


async def say_nothing(self, request, load):
    if load.num_waiting:
        raise Overloaded("full")


async def never(self, request, load):
    raise Overloaded("full", retry_after_s=1.0)


async def slow(self, request, load):
    if load.num_waiting:
        await trio.sleep(11)


async def lower(self, request, load):
    request.priority = request.priority + 1


async def all_in(self, request, load):
    pass


FAULTS = [
    ("test_it_lets_in_or_says_overloaded", admitting(refuse_wrongly)),
    ("test_it_lets_in_or_says_overloaded", admitting(say_no)),
    ("test_it_lets_in_or_says_overloaded", admitting(say_nothing)),
    ("test_it_lets_in_or_says_overloaded", admitting(lambda self, request, load: None)),
    ("test_an_idle_line_lets_somebody_in", admitting(never)),
    ("test_it_answers_within_the_time_it_has", admitting(slow)),
    ("test_it_leaves_the_request_as_it_is", admitting(lower)),
    ("test_those_who_leave_make_room", type("Leaks", (Good,), {"release": lambda self, request: None})),
    ("test_it_refuses_when_busy", admitting(all_in)),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("admission", Good, refuses_when_busy=True)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("admission", component, refuses_when_busy=True), [test])
