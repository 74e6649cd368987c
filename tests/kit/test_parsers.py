"""The contracts of parsers: what they let pass, and what they catch."""

from __future__ import annotations

import json

import pytest

from headrace.hooks.testing.contract import run
from headrace.hooks.testing.parsers import fold
from tests.kit.faults import contract_of, failures


class Splits:
    """Splits an answer at a pair of markers; what lies between them goes to *inside*."""

    opening, closing = "<call>", "</call>"

    def __init__(self, inside):
        self.inside = inside

    def stream(self):
        return Stream(self)


class Stream:
    def __init__(self, parser):
        self.parser = parser
        self.held = ""
        self.open = False
        self.number = 0

    def feed(self, text):
        self.held += text
        events = []
        while True:
            marker = self.parser.closing if self.open else self.parser.opening
            before, found, after = self.held.partition(marker)
            if not found:
                keep = max(n for n in range(len(marker)) if self.held.endswith(marker[:n]))
                said, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
                return events + self.tell(said)
            events += self.tell(before)
            self.held, self.open = after, not self.open
            self.number += self.open

    def finish(self):
        return self.tell(self.held)

    def tell(self, text):
        if not text:
            return []
        return [self.parser.inside(text, self.number - 1) if self.open else {"content": text}]


def call(text, number):
    return {"tool_calls": [{"index": number, "id": str(id(text)), "function": {"arguments": text}}]}


def thought(text, number):
    return {"reasoning_content": text}


class Tools(Splits):
    def __init__(self):
        super().__init__(call)


class Thoughts(Splits):
    def __init__(self):
        super().__init__(thought)


TOOL_ANSWERS = [
    (
        'Look: <call>{"a": 1}</call><call>{}</call>.',
        {
            "content": "Look: .",
            "tool_calls": [
                {"index": 0, "function": {"arguments": '{"a": 1}'}},
                {"index": 1, "function": {"arguments": "{}"}},
            ],
        },
    )
]
THOUGHTS = [("<call>hm <c</call>Yes.", {"reasoning_content": "hm <c", "content": "Yes."})]
KINDS = {"tool_parser": (Tools, TOOL_ANSWERS), "reasoning_parser": (Thoughts, THOUGHTS)}


def stream_of(good, **members):
    stream = type("FaultyStream", (Stream,), members)
    return type("Faulty", (good,), {"stream": lambda self: stream(self)})


def by_piece(self, text):
    return self.tell(text) if self.parser.opening not in text else Stream.feed(self, text)


def hold(self, text):
    self.held += text
    return []


def let_go(self):
    held, self.held = self.held, ""
    return Stream.feed(self, held) + Stream.finish(self)


def shared(good):
    class Shared(good):
        def stream(self):
            self.only = getattr(self, "only", None) or Stream(self)
            return self.only

    return Shared


FAULTS = {
    "test_answers_come_to_what_they_should": lambda good: type("Upper", (good,), {"opening": "<CALL>"}),
    "test_it_does_not_matter_where_an_answer_is_cut": lambda good: stream_of(good, feed=by_piece),
    "test_an_answer_without_markers_is_text": lambda good: stream_of(
        good, tell=lambda self, text: Stream.tell(self, text.replace("<", ""))
    ),
    "test_text_is_not_held_back": lambda good: stream_of(good, feed=hold, finish=let_go),
    "test_two_answers_at_once_do_not_mix": shared,
}


@pytest.mark.parametrize("slot", KINDS)
def test_a_good_one_keeps_every_promise(slot):
    good, answers = KINDS[slot]
    assert set(run(contract_of(slot, good, answers=answers)).values()) == {None}


@pytest.mark.parametrize("slot", KINDS)
@pytest.mark.parametrize("test", FAULTS)
def test_a_planted_fault_is_caught(slot, test):
    good, answers = KINDS[slot]
    assert test in failures(contract_of(slot, FAULTS[test](good), answers=answers), [test])


@pytest.mark.parametrize("slot", KINDS)
@pytest.mark.parametrize("event", ["text", {"content": {1, 2}}])
def test_an_event_that_json_cannot_say_is_caught(slot, event):
    faulty = stream_of(KINDS[slot][0], tell=lambda self, text: [event])
    test = "test_an_answer_without_markers_is_text"
    assert test in failures(contract_of(slot, faulty), [test])


def test_events_fold_into_the_message_a_client_has():
    parts = [{"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": a}}]} for a in '{"a"}']
    message = fold([{"content": "a"}, *parts, {"content": "b"}])
    assert message == {"content": "ab", "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a"}'}}]}
    assert json.dumps(message)
