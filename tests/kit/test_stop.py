"""The contract of stop watchers: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest
import trio
from msgspec import Struct

from tests.kit.faults import contract_of, failures, skipped


class Params(Struct, frozen=True, forbid_unknown_fields=True):
    word: str = "STOP"
    seconds: float = 30.0


class Word:
    """Stops at a word."""

    def __init__(self, params):
        self.word = params.word
        self.text = ""

    def feed(self, text, token_id):
        self.text += text
        return self.word in self.text


class Good:
    def watch(self, params):
        return Word(params)


class Clock:
    def __init__(self, params):
        self.end = trio.current_time() + params.seconds

    def feed(self, text, token_id):
        return trio.current_time() >= self.end


class Limit:
    def watch(self, params):
        return Clock(params)


class Only(Good):
    watcher = None

    def watch(self, params):
        self.watcher = self.watcher or Word(params)
        return self.watcher


def watching(base=Word, **members):
    watcher = type("Watcher", (base,), members)
    return type("Faulty", (Good,), {"watch": lambda self, params: watcher(params)})


def by_piece(self, text, token_id):
    return self.word in text


def at_length(self, text, token_id):
    self.text += text
    return len(self.text) > 12


FAULTS = [
    ("test_answers_end_where_they_should", watching(feed=lambda self, text, token_id: False)),
    ("test_answers_end_where_they_should", watching(feed=at_length)),
    ("test_other_answers_go_on", watching(feed=lambda self, text, token_id: text == "T")),
    ("test_it_does_not_matter_where_an_answer_is_cut", watching(feed=by_piece)),
    ("test_it_does_not_matter_where_an_answer_is_cut", watching(feed=lambda self, text, token_id: not text)),
    ("test_it_says_yes_or_no", watching(feed=lambda self, text, token_id: None)),
    ("test_two_answers_at_once_do_not_mix", Only),
]
ENDS = [({}, "Go on and STOP"), ({"word": "e"}, "Here"[:2])]
GOES_ON = [({}, "STO P and go on. TTT"), ({"word": "xx"}, "x x x")]


def made(component):
    return contract_of("stop", component, struct=Params, ends=ENDS, goes_on=GOES_ON)


def test_a_good_one_keeps_every_promise():
    assert failures(made(Good)) == {}
    assert skipped(made(Good)) == ["test_a_time_limit_is_kept"]


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(made(component), [test])


@pytest.mark.parametrize(("limit_s", "kept"), [(30.0, True), (20.0, False), (60.0, False)])
def test_a_time_limit_is_tried_by_the_clock_of_the_loop(limit_s, kept):
    tried = contract_of("stop", Limit, struct=Params, time_limit_s=limit_s, by_text=False)
    assert (failures(tried) == {}) is kept
