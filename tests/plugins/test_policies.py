"""Scheduler policies: their order, that order and victims agree, and the bound on waiting that each of them states."""

from bisect import insort
from random import Random

import pytest

from headrace.core.batch.turns import Turns
from headrace.hooks.protocols import RunningView, WaitingView
from tests.plugins.rig import build

POLICIES = ("fcfs", "priority", "fair-share", "deadline", "shortest")


def waiting(arrival=0.0, *, priority=0, num_tokens=10, num_left=10, tenant="", deadline=float("inf"), turn=0.0):
    return WaitingView(
        arrival=arrival,
        priority=priority,
        num_tokens=num_tokens,
        num_preemptions=0,
        tenant=tenant,
        deadline=deadline,
        num_left=num_left,
        turn=turn,
    )


def running(view):
    return RunningView(
        arrival=view.arrival,
        priority=view.priority,
        num_tokens=view.num_tokens,
        num_blocks=1,
        num_preemptions=0,
        parked=False,
        tenant=view.tenant,
        deadline=view.deadline,
        num_left=view.num_left,
        turn=view.turn,
    )


def order(policy, views):
    return sorted(views, key=lambda view: policy.order(view, 0.0))


@pytest.mark.parametrize("name", POLICIES)
def test_who_would_start_last_gives_way_first(name):
    policy, random = build("scheduler_policy", name).component, Random(0)
    views = [
        waiting(
            random.uniform(0, 10),
            priority=random.randint(-2, 2),
            num_tokens=0,
            num_left=random.randint(1, 100),
            deadline=random.uniform(0, 100),
            turn=random.uniform(0, 10),
        )
        for _ in range(50)
    ]
    assert order(policy, views) == sorted(views, key=lambda view: policy.victim(running(view)))


@pytest.mark.parametrize("name", POLICIES)
def test_equals_start_in_the_order_of_their_arrival(name):
    policy = build("scheduler_policy", name).component
    views = [waiting(float(arrival)) for arrival in range(5)]
    assert order(policy, views[::-1]) == views


def test_a_level_of_priority_is_worth_its_seconds_of_waiting():
    policy = build("scheduler_policy", "priority", level_s=30).component
    old, urgent_soon, urgent_late = waiting(0, priority=1), waiting(29, priority=0), waiting(31, priority=0)
    assert order(policy, [urgent_late, urgent_soon, old]) == [urgent_soon, old, urgent_late]


def test_no_priority_waits_longer_than_stated():
    policy = build("scheduler_policy", "priority", level_s=30, max_lead_s=100).component
    least, most = waiting(0, priority=2**31 - 1), waiting(201, priority=-(2**31))
    assert order(policy, [most, least]) == [least, most]
    assert order(policy, [waiting(199, priority=-(2**31)), least])[0].arrival == 199


def test_the_earliest_deadline_is_first_and_none_waits_longer_than_stated():
    policy = build("scheduler_policy", "deadline", default_s=60).component
    patient, pressed, late = waiting(0), waiting(50, deadline=55.0), waiting(61, deadline=61.5)
    assert order(policy, [late, patient, pressed]) == [pressed, patient, late]
    assert order(policy, [waiting(1, deadline=1e9), patient])[0] is patient


def test_the_shortest_is_first_and_none_waits_longer_than_stated():
    policy = build("scheduler_policy", "shortest", token_s=0.1, max_lag_s=20).component
    long, short, later = waiting(0, num_left=10**6), waiting(5, num_left=10), waiting(20.5, num_left=1)
    assert order(policy, [later, long, short]) == [short, long, later]


class Server:
    """Starts one request at a time, in the order of turns, and takes the tokens it said it would."""

    def __init__(self):
        self.turns = Turns()
        self.policy = build("scheduler_policy", "fair-share").component
        self.queue = []
        self.arrivals = 0

    def ask(self, tenant, num_tokens):
        self.arrivals += 1
        turn = self.turns.take(tenant, num_tokens)
        key = self.policy.order(waiting(float(self.arrivals), tenant=tenant, turn=turn), 0.0)
        insort(self.queue, (key, tenant, num_tokens))

    def serve(self):
        (turn, _), tenant, num_tokens = self.queue.pop(0)
        self.turns.started(turn)
        return tenant, num_tokens


def test_tenants_that_always_ask_get_the_same_share_whatever_they_ask():
    server, random = Server(), Random(1)
    largest = {"many": 10, "large": 500, "few": 90}
    served = dict.fromkeys(largest, 0)
    for _ in range(50):
        for tenant, size in largest.items():
            server.ask(tenant, random.randint(1, size))
    for _ in range(2000):
        tenant, num_tokens = server.serve()
        served[tenant] += num_tokens
        server.ask(tenant, random.randint(1, largest[tenant]))
        for one in largest:
            for other in largest:
                assert served[one] - served[other] <= largest[one] + largest[other]


def test_a_tenant_that_was_away_has_saved_nothing_up():
    server = Server()
    for _ in range(100):
        server.ask("busy", 10)
    for _ in range(50):
        server.serve()
    for _ in range(10):
        server.ask("back", 10)
    first = [server.serve()[0] for _ in range(20)]
    assert first.count("back") == 10
    assert "busy" in first[:3]


def test_what_an_answer_did_not_use_is_given_back():
    turns = Turns()
    turns.take("a", 1000)
    turns.give_back("a", 900)
    assert turns.take("a", 1) == 100


def test_only_so_many_tenants_are_remembered():
    turns = Turns()
    for index in range(5000):
        turns.started(turns.take(f"tenant {index}", 1))
    assert len(turns._next) <= 1025
