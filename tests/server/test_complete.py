"""One completion in the terminal."""

import io

import pytest

from headrace.core.local import run
from headrace.hooks.errors import BadRequest
from headrace.server.complete import FLAGS, complete
from tests.server.fake_engine import FakeEngine


def test_the_answer_is_printed_as_it_comes_and_its_numbers_apart():
    out, notes = io.StringIO(), io.StringIO()
    with run(FakeEngine()) as llm:
        complete(llm, "two words", {"max_tokens": 3}, out, notes)
    assert out.getvalue() == " w1 w2 w3\n"
    assert notes.getvalue().startswith("2 tokens of prompt, 3 of answer: the first after ")


def test_flags_reach_the_engine_and_only_those_given():
    engine = FakeEngine()
    with run(engine) as llm:
        complete(llm, "x", {"temperature": 0.5, "stop": ("a", "b")}, io.StringIO())
    assert engine.params == [{"temperature": 0.5, "stop": ("a", "b")}]


def test_a_value_out_of_range_is_the_engines_to_refuse():
    with run(FakeEngine()) as llm, pytest.raises(BadRequest, match="temperature"):
        complete(llm, "x", {"temperature": 99.0}, io.StringIO())


def test_an_interrupt_ends_the_answer_and_the_request():
    class Pressed(io.StringIO):
        def flush(self):
            raise KeyboardInterrupt

    engine, out = FakeEngine(), Pressed()
    with run(engine) as llm:
        complete(llm, "x", {"max_tokens": 50}, out)
        assert list(engine.closed.values()) == [(499, None)]
    assert out.getvalue() == " w1 [stopped]\n"


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_a_parameter_of_sampling(name):
    engine = FakeEngine()
    with run(engine) as llm:
        complete(llm, "x", {name: FLAGS[name](1)}, io.StringIO())
    assert engine.params == [{name: 1}]
