"""What one row, or one plugin, does wrong costs nobody else a token."""

import math

import pytest
import torch

from headrace.hooks.errors import BadRequest, RequestFailed
from headrace.hooks.messages import UNKNOWN_TOKEN
from tests.sampling.chains import Line, Stranger

INF, NAN = math.inf, math.nan


def raises(logits, rows):
    logits.fill_(NAN)
    raise ZeroDivisionError("division by zero")


def exits(logits, rows):
    raise SystemExit(1)


def shrinks(logits, rows):
    return logits.clone().resize_(0)


def fill(value):
    return lambda logits, rows: logits.fill_(value)


WRONGS = {
    "raises": (raises, "ZeroDivisionError: division by zero"),
    "exits": (exits, "SystemExit: 1"),
    "gives an empty tensor back": (shrinks, r"found \[0\]"),
    "gives nothing back": (lambda logits, rows: None, "a tensor must come back, found NoneType"),
    "gives too few rows back": (lambda logits, rows: logits[:1], r"found \[1, 50\]"),
    "gives another type back": (lambda logits, rows: logits.double(), "found .* torch.float64"),
    "writes NaN": (fill(NAN), "must stay finite, found nan"),
    "writes infinity": (fill(INF), "must stay finite, found inf"),
    "rules everything out": (fill(-INF), "must stay finite, found -inf"),
}


def drawn(slots, *, strangers=(), users=()):
    """Five sequences, of whom *users* use the stranger; what each row of *slots* drew."""
    line = Line(50, strangers=strangers)
    for slot in range(5):
        line.admit(slot, seed=slot, temperature=0.8, strangers=[0] if slot in users else [])
    rows = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    return line.draw(rows[list(slots)], slots)


@pytest.mark.parametrize("users", [[1, 2], [0, 3], [0, 1, 3, 4]])
@pytest.mark.parametrize("wrong", WRONGS)
def test_a_wrong_processor_fails_its_own_rows_by_name(wrong, users):
    action, reason = WRONGS[wrong]
    expected = drawn(range(5)).token_ids
    result = drawn(range(5), strangers=[Stranger(action)], users=users)
    assert sorted(result.errors) == users
    for row in range(5):
        assert result.token_ids[row] == (UNKNOWN_TOKEN if row in users else expected[row])
    for error in result.errors.values():
        assert isinstance(error, RequestFailed)
        assert error.plugin == "theirs"
        assert error.args[0].startswith("logits processor stranger-0 of plugin theirs failed: ")
        with pytest.raises(RequestFailed, match=reason):
            raise error


@pytest.mark.parametrize("users", [[1, 2], [0, 3]])
def test_a_processor_sees_only_its_own_rows(users):
    stranger = Stranger()
    drawn(range(5), strangers=[stranger], users=users)
    (logits, slots), rows = stranger.shown[0], torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    assert slots == users
    torch.testing.assert_close(logits, rows[users] / 0.8)


@pytest.mark.parametrize("users", [[1, 2], [0, 3]])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_change_reaches_its_own_rows_in_place_or_not(users, in_place):
    def force(logits, rows):
        logits = logits if in_place else logits.clone()
        logits[:, 17] = 1e6
        return logits

    expected = drawn(range(5)).token_ids
    result = drawn(range(5), strangers=[Stranger(force)], users=users).token_ids
    assert result == [17 if row in users else expected[row] for row in range(5)]


def test_nan_in_one_row_of_a_processor_leaves_its_other_rows_alone():
    def spoil_first(logits, rows):
        logits[0, 3] = NAN
        return logits

    result = drawn(range(5), strangers=[Stranger(spoil_first)], users=[1, 2, 4])
    assert list(result.errors) == [1]


class Refuses(Stranger):
    """Fails to admit slot 1."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def admit(self, slot, params, admitted):
        if slot == 1:
            raise self.error
        return True


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), 500), (BadRequest("too much"), 400)])
def test_a_processor_that_fails_to_admit_fails_that_slot_when_it_draws(error, status):
    result = drawn(range(5), strangers=[Refuses(error)], users=[1, 2])
    assert {row: error.status for row, error in result.errors.items()} == {1: status}


def test_a_bias_beyond_the_vocabulary_does_not_reach_the_next_row():
    line = Line(4)
    for slot in range(2):
        line.admit(slot, temperature=0, chain={"logit-bias": {"bias": {7 if slot == 0 else 1: 5.0}}})
    draws = line.draw([[0, 0, 0, 1]] * 2, [0, 1])
    assert {row: error.status for row, error in draws.errors.items()} == {0: 400}
    assert draws.token_ids[1] == 1


def test_a_slot_recovers_when_its_next_owner_is_admitted():
    line = Line(4, strangers=[Stranger(raises)])
    line.admit(0, temperature=0, strangers=[0])
    assert list(line.draw([[0, 1, 0, 0]], [0]).errors) == [0]
    line.admit(0, temperature=0)
    assert line.draw([[0, 1, 0, 0]], [0]).token_ids == [1]


@pytest.mark.parametrize("temperature", [0, 1])
def test_sa22_a_row_without_usable_logits_fails_alone(temperature):
    logits = torch.zeros(6, 300)
    logits[1] = NAN
    logits[2] = -INF
    logits[2, 205] = -3
    logits[3] = -INF
    logits[4, 7] = INF
    logits[5, 9] = NAN
    line = Line(300)
    for slot in range(6):
        line.admit(slot, temperature=temperature, logprobs=1, chain={"top-p": {"p": 0.9}})
    result = line.draw(logits, range(6))
    assert sorted(result.errors) == [1, 3, 4, 5]
    assert result.token_ids[2] == 205
    assert all(result.token_ids[row] == UNKNOWN_TOKEN for row in result.errors)
    assert sorted(result.logprobs) == [0, 2]
    assert "must be finite for a token to be drawn, found nan" in str(result.errors[1])


def test_a_failed_row_leaves_no_token_behind():
    line = Line(4)
    line.admit(0, temperature=0, output=[2])
    line.draw([[NAN] * 4], [0], [1])
    assert line.state.last_token(0) == 2


class Draws:
    """A sampler that gives back what it was made with, or raises it."""

    def __init__(self, result):
        self.result = result

    def sample(self, logits, uniforms, rows):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ValueError("no"), "ValueError: no"),
        (torch.tensor([1, 1]), r"\[3\] torch.int64 must come back, found \[2\]"),
        (torch.tensor([1.0, 1.0, 1.0]), "found .* torch.float32"),
    ],
)
def test_a_wrong_sampler_fails_drawn_rows_and_no_greedy_one(result, reason):
    line = Line(4, sampler=Draws(result))
    for slot in range(4):
        line.admit(slot, temperature=0 if slot == 1 else 1)
    draws = line.draw([[0, 0, 9, 0]] * 4, range(4))
    assert sorted(draws.errors) == [0, 2, 3]
    assert draws.token_ids[1] == 2
    with pytest.raises(RequestFailed, match=f"^sampler spy of plugin spies failed: .*{reason}"):
        raise draws.errors[0]


@pytest.mark.parametrize("token_id", [-1, 4, 3])
def test_an_id_that_is_ruled_out_or_beyond_the_vocabulary_is_an_error_of_its_row(token_id):
    line = Line(4, sampler=Draws(torch.tensor([1, token_id])))
    line.admit(0)
    line.admit(1)
    draws = line.draw([[0, 0, 0, -INF]] * 2, [0, 1])
    assert draws.token_ids == [1, UNKNOWN_TOKEN]
    assert f"found {token_id}" in str(draws.errors[1])


def test_a_drawn_request_without_a_seed_is_refused_and_a_greedy_one_is_not():
    line = Line(4)
    line.admit(0, seed=None)
    line.admit(1, seed=None, temperature=0)
    draws = line.draw([[0, 1, 0, 0]] * 2, [0, 1])
    assert list(draws.errors) == [0]
    assert draws.token_ids[1] == 1
