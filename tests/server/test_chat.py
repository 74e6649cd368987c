"""The conversation in the terminal."""

import io
from contextlib import closing

import pytest
import trio

from headrace.core.local import run
from headrace.hooks.errors import Overloaded, RequestFailed, StartError
from headrace.server.chat import remote, talk
from tests.server.fake_engine import FakeEngine


def talk_with(answer, *lines: object) -> str:
    """What is printed when a user types *lines*; an exception among them is raised."""
    pending = list(lines)
    out = io.StringIO()

    def ask() -> str:
        line = pending.pop(0) if pending else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    talk(answer, ask, out)
    assert pending == [] or "/exit" in lines
    return out.getvalue()


def test_the_history_grows_with_each_turn():
    seen = []

    def answer(messages):
        seen.append(list(messages))
        yield from ("fi", "ne")

    assert talk_with(answer, "how", "", "and now", "/exit", "never") == "fine\nfine\n"
    roles = [[message["role"] for message in messages] for messages in seen]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert seen[1][1]["content"] == "fine"


def test_an_interrupt_stops_the_answer_and_keeps_what_came():
    seen, closed = [], []

    def answer(messages):
        seen.append(list(messages))
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    assert talk_with(answer, "a", "b") == "half [stopped]\nhalf [stopped]\n\n"
    assert seen[1][1] == {"role": "assistant", "content": "half"}
    assert closed == [True, True]


def test_an_interrupt_at_the_prompt_ends_the_talk():
    assert talk_with(None, KeyboardInterrupt()) == "\n"


def test_an_error_is_shown_and_its_question_forgotten():
    seen = []

    def answer(messages):
        seen.append(list(messages))
        raise Overloaded("too much")
        yield ""

    assert talk_with(answer, "a", "b") == "[too much]\n[too much]\n\n"
    assert [len(messages) for messages in seen] == [1, 1]


async def test_a_remote_model_streams(site):
    answer = await trio.to_thread.run_sync(remote, site.url)
    pieces = await trio.to_thread.run_sync(lambda: list(answer([{"role": "user", "content": "hi"}])))
    assert "".join(pieces).startswith(" w1 w2")


async def test_a_remote_models_error_is_told(site, engine):
    answer = await trio.to_thread.run_sync(remote, f"{site.url}/v1")
    engine.refusal = Overloaded("the line is full")
    with pytest.raises(RequestFailed, match="the line is full"):
        await trio.to_thread.run_sync(lambda: list(answer([{"role": "user", "content": "hi"}])))


async def test_closing_a_remote_answer_cancels_it(site, engine):
    engine.hold_at = 1

    def take_one():
        with closing(remote(site.url)([{"role": "user", "content": "hi"}])) as pieces:
            return next(pieces)

    assert await trio.to_thread.run_sync(take_one) == " w1"
    assert await engine.wait_closed(1) == [(499, None)]


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(StartError, match="--url must be"):
        remote(url)


def test_a_local_model_streams_and_ends():
    engine = FakeEngine()
    with run(engine) as llm:
        assert talk_with(llm.stream_chat, "hi").startswith(" w1 w2")
        assert list(engine.closed.values()) == [(200, None)]
        pieces = llm.stream_chat([{"role": "user", "content": "again"}])
        next(pieces)
        pieces.close()
        assert len(engine.closed) == 2


def test_a_local_model_that_cannot_start_is_told():
    class Broken(FakeEngine):
        async def run(self, *, progress=None):
            raise StartError("no such checkpoint")

    with pytest.raises(StartError, match="no such checkpoint"), run(Broken()):
        pass
