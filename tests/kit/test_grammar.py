"""The contract of grammars: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest

from headrace.hooks.errors import BadRequest
from headrace.hooks.testing.contract import run
from tests.kit.faults import contract_of, failures

END = 257


class Matcher:
    """One of several texts."""

    def __init__(self, choices):
        self.choices = choices
        self.said = b""

    def allowed(self):
        here = [choice[len(self.said) :] for choice in self.choices if choice.startswith(self.said)]
        return {rest[0] if rest else END for rest in here}

    def fill(self, mask):
        mask.fill_(False)
        mask[list(self.allowed())] = True

    def accept(self, token_id):
        if token_id not in self.allowed():
            return False
        self.said += bytes([token_id]) if token_id < 256 else b""
        return True


class Good:
    matcher = Matcher

    def compile(self, kind, source):
        if kind != "choice" or not source:
            raise BadRequest(f"must be a choice, got {kind}")
        choices = [choice.encode() for choice in source.split("|")]
        return lambda: self.matcher(choices)


def matching(**members):
    return type("Faulty", (Good,), {"matcher": type("FaultyMatcher", (Matcher,), members)})


class Trusting(Good):
    def compile(self, kind, source):
        kinds = {"choice": Good.compile}
        return kinds[kind](self, kind, source)


class Lax(Good):
    def compile(self, kind, source):
        return Good.compile(self, "choice", source or "x")


class Only(Good):
    def compile(self, kind, source):
        matcher = Good.compile(self, kind, source)()
        return lambda: matcher


def no_end(self):
    return Matcher.allowed(self) - {END} or {97}


def any_length(self):
    return Matcher.allowed(self) | {END}


def dead(self):
    """Lets in what leads nowhere."""
    allowed = Matcher.allowed(self)
    return allowed | {98} if self.said == b"y" else allowed


def all_in(self, token_id):
    Matcher.accept(self, token_id)
    return True


def adds(self, mask):
    mask[list(self.allowed())] = True


def moves(self, mask):
    Matcher.fill(self, mask)
    self.accept(min(self.allowed()))


def dead_accept(self, token_id):
    if token_id == 98 and self.said == b"y":
        self.said += b"b"
        return True
    return Matcher.accept(self, token_id)


FAULTS = [
    ("test_answers_that_conform_are_accepted", matching(allowed=no_end)),
    ("test_answers_that_conform_are_accepted", matching(accept=lambda self, token_id: None)),
    ("test_answers_that_do_not_conform_are_rejected", matching(allowed=any_length)),
    ("test_mask_and_accept_agree", matching(accept=all_in)),
    ("test_fill_says_all_of_the_mask", matching(fill=adds)),
    ("test_fill_says_all_of_the_mask", matching(fill=moves)),
    ("test_something_may_always_come", matching(allowed=dead, accept=dead_accept)),
    ("test_two_answers_at_once_do_not_mix", Only),
    ("test_what_cannot_be_compiled_is_a_bad_request", Trusting),
    ("test_what_cannot_be_compiled_is_a_bad_request", Lax),
]
EXAMPLES = {
    "accepts": [("choice", "yes|no", "yes"), ("choice", "yes|no", "no"), ("choice", "é", "é")],
    "rejects": [("choice", "yes|no", "maybe"), ("choice", "yes|no", "ye"), ("choice", "yes|no", "yess")],
    "malformed": [("choice", "")],
}


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("grammar", Good, **EXAMPLES)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("grammar", component, **EXAMPLES), [test])
