import pytest

from headrace.server.bench.answer import Answer
from headrace.server.bench.framing import WireError
from tests.server.bench.odd_server import DONE, FINISH, text

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
COUNTS = b'{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}'
USAGE = b'data: {"choices":[],"usage":%b}\n\n' % COUNTS


def answer(*pieces: bytes, status: int = 200, kind: str = "text/event-stream; charset=utf-8") -> Answer:
    of = Answer()
    of.head(status, kind)
    for piece in pieces:
        of.body(piece)
    of.end()
    return of


def test_only_events_with_text_are_tokens():
    of = answer(ROLE + b": a comment\n\n", text("a"), text("b") + FINISH, USAGE + DONE)
    assert len(of.times) == 2
    assert of.num_events == 6
    assert (of.error, of.finish) == (None, "stop")


@pytest.mark.parametrize("size", [1, 5, 64])
def test_events_are_read_however_they_are_cut(size):
    data = (text("a") + text("ü") + FINISH + USAGE + DONE).replace(b"\n\n", b"\r\n\r\n")
    of = answer(*(data[at : at + size] for at in range(0, len(data), size)))
    assert len(of.times) == 2
    assert of.usage.completion_tokens == 2
    assert of.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize(
    "choice",
    [
        b'{"text":"a"}',
        b'{"delta":{"reasoning_content":"a"}}',
        b'{"delta":{"reasoning":"a"}}',
        b'{"delta":{"tool_calls":[{}]}}',
    ],
)
def test_text_thoughts_and_calls_are_all_tokens(choice):
    assert len(answer(b'data: {"choices":[%b]}\n\n' % choice, DONE).times) == 1


@pytest.mark.parametrize("end", [FINISH, DONE], ids=["finish_reason", "done"])
def test_either_mark_of_an_end_is_enough(end):
    assert answer(text("a"), end).error is None


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ([text("a")], "cut short", "without a finish_reason"),
        ([ROLE, FINISH, DONE], "empty", "no text"),
        ([text("a"), b'data: {"error":{"message":"it broke","code":500}}\n\n'], "error event", "it broke"),
        ([text("a"), b'data: {"error":"it broke"}\n\n', DONE], "error event", "it broke"),
    ],
)
def test_a_stream_that_goes_wrong_has_its_kind_of_error(pieces, kind, message):
    of = answer(*pieces)
    assert of.error == kind
    assert message in of.message


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (429, b'{"error":{"message":"the line is full"}}', "http 429", "the line is full"),
        (502, b"<html>bad gateway</html>", "http 502", "<html>bad gateway</html>"),
        (200, b'{"error":{"message":"no such model"}}', "not a stream", "no such model"),
        (200, b'{"choices":[{"text":"all at once"}]}', "not a stream", "all at once"),
    ],
)
def test_an_answer_that_is_no_stream_is_an_error_with_the_servers_words(status, body, kind, message):
    of = answer(body, status=status, kind="application/json")
    assert of.error == kind
    assert message in of.message


def test_an_event_that_is_no_json_is_refused_with_what_it_was():
    with pytest.raises(WireError, match=r"no chunk of an answer.*oops"):
        answer(b"data: {oops\n\n")
