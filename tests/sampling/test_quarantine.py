"""Strangers among the processors: what they are lent, what they can reach, and when they are not called any more."""

import math
from array import array

import msgspec
import pytest
import torch

from headrace.core.containment import Ledger
from headrace.core.history import OwnHistory, TokenHistory
from headrace.core.sampling import SamplingState
from headrace.hooks.components import Bound
from headrace.hooks.errors import RequestFailed, Unavailable
from headrace.hooks.messages import UNKNOWN_TOKEN, Release
from tests.sampling.chains import Line, Params, Stranger

NAN, INF = math.nan, math.inf
ROWS = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
BUILT_IN, THEIRS = "headrace 1.0", "acme 1.0"


def bound(component, *, distribution=THEIRS, name="own"):
    return Bound(name=name, plugin="theirs", component=component, distribution=distribution)


class Bench:
    """One processor and a sampler over five slots, of which *users* use the processor."""

    def __init__(self, processor=None, *, sampler=None, users=(1, 2), distribution=THEIRS, temperature=1.0, **limits):
        self.ledger = Ledger(**limits)
        self.line = Line(50)
        self.users = users
        self.processor = processor
        self.temperature = temperature
        processors = [bound(processor, distribution=distribution)] if processor else []
        self.num_processors = len(processors)
        self.account = self.ledger.account("logits_processor", processors[0]) if processors else None
        self.state = SamplingState(
            num_slots=8,
            vocab_size=50,
            chain=[processors],
            sampler=bound(sampler or self.line.spy.sampler, distribution=THEIRS if sampler else BUILT_IN),
            ledger=self.ledger,
        )

    def admit(self, slot, *, uses, temperature=None):
        temperature = self.temperature if temperature is None else temperature
        op = self.line.op(slot, seed=slot, temperature=temperature, prompt=[slot, 7])
        self.state.apply_ops((msgspec.structs.replace(op, chain=(Params() if uses else None,) * self.num_processors),))

    def draw(self, slots=range(5)):
        for slot in slots:
            self.admit(slot, uses=slot in self.users)
        return self.again(slots)

    def again(self, slots=range(5)):
        slots = list(slots)
        return self.state.draw(ROWS[slots].clone(), slots, [0] * len(slots))


def others(draws, users=(1, 2)):
    return [token for row, token in enumerate(draws.token_ids) if row not in users]


def expected():
    return Bench(Stranger(), users=()).draw().token_ids


class Thief(Stranger):
    """Keeps all that it is lent, and writes wherever that leads."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def apply(self, logits, rows):
        for kept in self.kept:
            kept.fill_(1e9)
        self.kept.append(logits)
        shape = logits.shape
        logits.resize_(len(ROWS) * 2, shape[1]).fill_(1e9)
        rows.slots.clear()
        return logits.resize_(shape)


@pytest.mark.parametrize("users", [(0, 1), (0, 2), (1, 2)])
def test_a_stranger_that_resizes_and_keeps_what_it_was_lent_reaches_no_other_row(users):
    bench = Bench(Thief(), users=users)
    for _ in range(3):
        assert others(bench.draw(), users) == others(Bench(Stranger(), users=()).draw(), users)


class ThievingSampler:
    def __init__(self):
        self.kept = []

    def sample(self, logits, uniforms, rows):
        for kept in (*self.kept, logits):
            kept.fill_(0.0)
        self.kept.append(logits)
        logits.resize_(10, 50).fill_(0.0)
        return torch.full((len(uniforms),), 3)


def test_a_sampler_that_writes_into_its_logits_changes_nothing_of_what_may_be_drawn():
    bench = Bench(sampler=ThievingSampler(), users=())
    for slot in range(3):
        bench.admit(slot, uses=False)
    logits = torch.zeros(3, 50)
    logits[1, 3] = -INF
    draws = bench.state.draw(logits, [0, 1, 2], [0, 0, 0])
    assert (draws.token_ids, list(draws.errors)) == ([3, UNKNOWN_TOKEN, 3], [1])
    assert logits[0, 5] == 0
    assert logits[1, 3] == -INF


def test_a_builtin_is_lent_its_rows_where_they_lie_and_a_stranger_is_not():
    lent = []

    def note(logits, rows):
        lent.append(logits.data_ptr())
        return logits

    for distribution in (BUILT_IN, THEIRS):
        bench = Bench(Stranger(note), users=(2, 3), distribution=distribution)
        for slot in range(5):
            bench.admit(slot, uses=slot in bench.users)
        logits = ROWS.clone()
        bench.state.draw(logits, list(range(5)), [0] * 5)
        lent.append(logits[2].data_ptr())
    assert lent[0] == lent[1]
    assert lent[2] != lent[3]


def history():
    made = TokenHistory(4)
    made.admit(0, array("i", [1, 2]), array("i", [3, 3]))
    made.admit(1, array("i", [5]), array("i", [6]))
    return made


READERS = {
    "prompt": lambda history, slot: [history.prompt(slot)],
    "output": lambda history, slot: [history.output(slot)],
    "output_counts": lambda history, slot: history.output_counts(slot),
    "seen": lambda history, slot: [history.seen(slot)],
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_strangers_history_is_its_own_slots_and_a_copy(read):
    whole = history()
    own = OwnHistory(whole, [0])
    before = [tensor.tolist() for tensor in read(whole, 0)]
    assert [tensor.tolist() for tensor in read(own, 0)] == before
    for tensor in read(own, 0):
        tensor.fill_(9)
    assert [tensor.tolist() for tensor in read(whole, 0)] == before
    with pytest.raises(ValueError, match=r"one of this call's, \[0\], got 1"):
        read(own, 1)


def raises(logits, rows):
    raise ZeroDivisionError("on purpose")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def raises_mutely(logits, rows):
    raise Mute


class Odd(torch.Tensor):
    """A tensor that does not do what it is asked."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("not me")


WRONGS = {
    "raises": raises,
    "raises what cannot be told": raises_mutely,
    "writes NaN": lambda logits, rows: logits.fill_(NAN),
    "gives the wrong shape": lambda logits, rows: logits[:, :3],
    "gives the wrong type": lambda logits, rows: logits.half(),
    "gives a tensor that is nowhere": lambda logits, rows: torch.empty_like(logits, device="meta"),
    "gives a sparse tensor": lambda logits, rows: logits.to_sparse(),
    "resizes what it was lent": lambda logits, rows: logits.resize_(3),
    "gives nothing": lambda logits, rows: None,
}


@pytest.mark.parametrize("wrong", WRONGS.values(), ids=WRONGS)
def test_five_failures_in_a_row_are_quarantine_and_no_row_of_others_notices(wrong):
    calls = []

    def count(logits, rows):
        calls.append(1)
        return wrong(logits, rows)

    bench = Bench(Stranger(count))
    for turn in range(7):
        draws = bench.draw()
        assert sorted(draws.errors) == [1, 2]
        assert others(draws) == others(Bench(Stranger(), users=()).draw())
        assert isinstance(draws.errors[1], RequestFailed if turn < 5 else Unavailable)
    assert (len(calls), bench.account.errors) == (5, 5)
    assert "in quarantine" in str(draws.errors[1])


def test_a_tensor_of_another_kind_is_taken_as_a_plain_one():
    result = Bench(Stranger(lambda logits, rows: logits.as_subclass(Odd))).draw()
    assert (result.token_ids, result.errors) == (expected(), {})


def test_a_running_sequence_of_a_processor_in_quarantine_fails_and_its_neighbours_go_on():
    bench = Bench(Stranger(), quarantine_after=1)
    assert bench.draw().errors == {}
    bench.account.failed("no")
    draws = bench.again()
    assert sorted(draws.errors) == [1, 2]
    assert all(isinstance(error, Unavailable) for error in draws.errors.values())


def test_a_failed_sequence_asks_no_plugin_again_in_the_step_that_was_planned_already():
    bench = Bench(Stranger(raises))
    first, second = bench.draw(), bench.again()
    assert second.errors == first.errors
    assert bench.account.errors == 1


def test_one_bad_row_among_good_ones_is_an_error_and_no_step_towards_quarantine():
    def spoil_first(logits, rows):
        logits[0] = NAN
        return logits

    bench = Bench(Stranger(spoil_first), quarantine_after=1)
    assert [sorted(bench.draw().errors) for _ in range(3)] == [[1], [1], [1]]
    assert (bench.account.errors, bench.account.quarantined) == (3, None)


class FailsInTheMiddle(Stranger):
    """Serves the first row of every sequence, and not the second, unless told otherwise."""

    def apply(self, logits, rows):
        self.shown.append(rows.num_outputs)
        return logits.fill_(NAN) if rows.num_outputs[0] and not self.action else logits


def run_answer(bench):
    """Two tokens of one sequence; whether it got both."""
    bench.admit(1, uses=True)
    errors = [bench.state.draw(ROWS[[1]].clone(), [1], [position]).errors for position in range(2)]
    bench.state.apply_ops((Release(slot=1),))
    return not any(errors)


def test_one_that_fails_in_the_middle_of_every_answer_goes_into_quarantine():
    bench = Bench(FailsInTheMiddle(action=None), quarantine_after=3)
    assert [run_answer(bench) for _ in range(3)] == [False, False, False]
    assert bench.account.quarantined is not None


def test_an_answer_that_went_well_ends_the_row_of_failures():
    bench = Bench(FailsInTheMiddle(action=None), quarantine_after=3)
    for _ in range(3):
        assert [run_answer(bench) for _ in range(2)] == [False, False]
        bench.processor.action = "good"
        assert run_answer(bench)
        bench.processor.action = None
    assert (bench.account.errors, bench.account.quarantined) == (6, None)


def test_ruling_out_every_token_fails_the_request_and_not_the_plugin():
    bench = Bench(Stranger(lambda logits, rows: logits.fill_(-INF)), quarantine_after=1)
    assert sorted(bench.draw().errors) == [1, 2]
    assert bench.account.quarantined is None


def test_a_processor_that_never_admits_goes_into_quarantine():
    class Refuses(Stranger):
        def admit(self, slot, params, admitted):
            raise RuntimeError("on purpose")

    bench = Bench(Refuses(), users=(1,), quarantine_after=3)
    errors = [bench.draw().errors[1] for _ in range(4)]
    assert [type(error) for error in errors] == [RequestFailed] * 3 + [Unavailable]


def test_parameters_that_change_nothing_are_remembered_for_a_quarantine():
    class Neutral(Stranger):
        def admit(self, slot, params, admitted):
            return False

    bench = Bench(Neutral(), quarantine_after=1)
    bench.draw()
    bench.account.failed("no")
    assert bench.draw().errors == {}


class BadSampler:
    def __init__(self, result):
        self.result = result

    def sample(self, logits, uniforms, rows):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result(len(uniforms))


@pytest.mark.parametrize(
    "result",
    [
        ValueError("no"),
        lambda n: torch.zeros(n + 1, dtype=torch.int64),
        lambda n: torch.zeros(n),
        lambda n: torch.full((n,), 50),
        lambda n: None,
        lambda n: torch.zeros(n, dtype=torch.int64, device="meta"),
    ],
    ids=["raises", "too many", "floats", "no token", "nothing", "nowhere"],
)
def test_a_sampler_that_fails_goes_into_quarantine_and_greedy_rows_go_on(result):
    bench = Bench(sampler=BadSampler(result))
    for turn in range(6):
        for slot in range(5):
            bench.admit(slot, uses=False, temperature=slot % 2)
        draws = bench.again()
        assert sorted(draws.errors) == [1, 3]
        assert [draws.token_ids[row] for row in (0, 2, 4)] == ROWS[[0, 2, 4]].argmax(-1).tolist()
        assert isinstance(draws.errors[1], RequestFailed if turn < 5 else Unavailable)


def test_each_call_of_a_step_is_told_with_its_seconds_and_whose_rows_it_was_for():
    draws = Bench(Stranger(), users=(0, 3)).draw()
    assert [(call.who, call.slots) for call in draws.plugins] == [
        ("theirs/own", frozenset({0, 3})),
        ("theirs/own", frozenset(range(5))),
    ]
    assert all(call.seconds > 0 for call in draws.plugins)


def test_a_processor_that_nobody_uses_is_not_called():
    stranger = Stranger()
    bench = Bench(stranger, users=())
    bench.draw()
    assert (stranger.shown, bench.account.calls) == ([], 0)
