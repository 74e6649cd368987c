from array import array

import pytest

from headrace.core.history import TokenHistory


@pytest.fixture
def history():
    history = TokenHistory(num_slots=2)
    history.admit(0, array("i", [7, 7, 3]), array("i", [5]))
    return history


def counts(history, slot):
    ids, times = history.output_counts(slot)
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


def test_prompt_and_output_are_kept_apart(history):
    history.append(0, 9)
    assert history.prompt(0).tolist() == [7, 7, 3]
    assert history.output(0).tolist() == [5, 9]


def test_counts_are_of_the_output_alone_and_follow_each_token(history):
    assert counts(history, 0) == {5: 1}
    for token_id in (7, 5, 5):
        history.append(0, token_id)
    assert counts(history, 0) == {5: 3, 7: 1}


def test_seen_has_each_id_of_prompt_and_output_once(history):
    assert sorted(history.seen(0).tolist()) == [3, 5, 7]
    for token_id in (7, 1, 1):
        history.append(0, token_id)
    assert sorted(history.seen(0).tolist()) == [1, 3, 5, 7]


def test_admitting_leaves_nothing_of_the_owner_before(history):
    history.seen(0), history.output_counts(0)
    history.admit(0, array("i", [1]), array("i"))
    assert history.output(0).tolist() == []
    assert counts(history, 0) == {}
    assert history.seen(0).tolist() == [1]


def test_a_slot_does_not_see_its_neighbours_tokens(history):
    history.admit(1, array("i", [2]), array("i"))
    history.append(1, 9)
    assert history.output(0).tolist() == [5]
    assert sorted(history.seen(1).tolist()) == [2, 9]


def test_a_long_output_is_kept_whole(history):
    for token_id in range(1000):
        history.append(0, token_id)
    assert history.output(0).tolist() == [5, *range(1000)]
    assert len(history.seen(0)) == 1000
