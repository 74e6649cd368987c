"""How long steps take, and what fits beside running streams."""

from __future__ import annotations

import pytest

from headrace.core.batch.pace import Pace


def pace(*, target_step_s: float | None = None, max_pause: float | None = 4.0) -> Pace:
    return Pace(target_step_s=target_step_s, max_pause=max_pause, least=16)


def test_nothing_is_limited_before_anything_is_known_or_where_nobody_waits():
    found = pace()
    assert found.room(3) is None
    found.measure(0, 100, 1.0)
    assert found.room(0) is None
    assert found.room(3) is None  # How long three take was never seen.
    assert pace(max_pause=None).room(1) is None


def test_a_pause_is_a_multiple_of_the_step_that_so_many_decodes_take():
    found = pace()
    found.measure(0, 100, 1.0)
    for num_decodes, step_s in ((1, 0.05), (8, 0.08), (32, 0.2)):
        found.measure(num_decodes, 0, step_s)
    # 10 ms a token; what is left of four times a step, beside the step itself.
    assert [found.room(n) for n in (1, 8, 32)] == [15, 24, 60]


@pytest.mark.parametrize(("num_decodes", "room"), [(1, 5), (2, 6), (4, 8), (6, 11), (8, 14), (12, 18)])
def test_between_sizes_that_were_seen_and_beside_them_time_grows_evenly(num_decodes, room):
    """10 ms a token. Four take 80 ms, eight 140; two take two tokens less than four, one at least a quarter of four."""
    found = pace(max_pause=2.0)
    found.measure(0, 100, 1.0)
    found.measure(4, 0, 0.08)
    found.measure(8, 0, 0.14)
    assert found.room(num_decodes) == room


def test_decodes_are_not_taken_for_what_a_prompt_costs():
    """Rows of many sequences read much of the cache: a token of a prompt beside them takes no longer for it."""
    found = pace()
    found.measure(32, 0, 0.5)
    found.measure(32, 50, 1.0)
    assert found.room(32) == 150  # 10 ms a token, not 12.


def test_a_small_step_says_nothing_of_a_token():
    found = pace()
    found.measure(0, 100, 1.0)
    found.measure(1, 0, 0.05)
    found.measure(1, 10, 5.0)
    assert found.room(1) == 15


def test_what_holds_a_step_up_for_a_moment_hardly_counts():
    found = pace()
    found.measure(0, 100, 1.0)
    for step_s in (0.05, 9.0, 0.05):
        found.measure(1, 0, step_s)
    assert found.room(1) == 15
