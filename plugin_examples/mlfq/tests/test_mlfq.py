import headrace_mlfq
import pytest

from headrace.hooks.protocols import RunningView, WaitingView
from headrace.testing import SchedulerPolicyContract


class TestMlfq(SchedulerPolicyContract):
    plugin = headrace_mlfq


POLICY = headrace_mlfq.MultiLevelFeedbackQueue(None, headrace_mlfq.Options(quantum=100, levels=4, promote_s=5.0))


def key(num_tokens, arrival=0.0):
    view = WaitingView(arrival=arrival, priority=0, num_tokens=num_tokens, num_preemptions=0, tenant="")
    return POLICY.order(view, now=100.0)


@pytest.mark.parametrize(("num_tokens", "level"), [(1, 0), (100, 0), (101, 1), (200, 1), (201, 2), (400, 2), (9999, 3)])
def test_a_request_joins_the_level_whose_quantum_covers_it(num_tokens, level):
    assert POLICY.level(num_tokens) == level


def test_short_work_overtakes_long_work_that_came_a_little_earlier():
    assert key(50, arrival=4.0) < key(150, arrival=0.0)


def test_long_work_is_promoted_by_waiting():
    assert key(9999, arrival=0.0) < key(50, arrival=15.1)


def test_who_has_used_most_gives_way():
    def victim(num_tokens):
        return POLICY.victim(
            RunningView(arrival=0.0, priority=0, num_tokens=num_tokens, num_blocks=1, num_preemptions=0, parked=False)
        )

    assert victim(500) > victim(50)
