"""The client of benchmarks/ reads an answer's times and tokens from the bytes that came."""

from __future__ import annotations

import json

from benchmarks.client import Answer, Stream

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def usage(completion: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": completion}}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(*pieces: bytes) -> Answer:
    stream = Stream()
    stream.pieces = list(pieces)
    stream.times = [float(number) for number in range(len(pieces))]
    return Answer(stream)


def test_an_event_came_with_the_piece_that_holds_its_end() -> None:
    first, second = chunk(event("a")), chunk(event("b"))
    found = answer(HEAD + first[:9], first[9:] + second[:-12], second[-12:] + chunk(usage(7)), b"0\r\n\r\n")
    assert found.text_times == [1.0, 2.0]
    assert (found.num_tokens, found.counted, found.error) == (7, True, None)


def test_an_event_cut_by_chunks_is_whole_again() -> None:
    data = event("a") + event("b")
    found = answer(HEAD + chunk(data[:20]), chunk(data[20:]))
    assert found.text_times == [1.0, 1.0]


def test_a_stream_that_was_cut_keeps_what_came_before() -> None:
    found = answer(HEAD + chunk(event("a")), chunk(event("b"))[:15])
    assert found.text_times == [0.0]
    assert (found.num_tokens, found.counted) == (1, False)


def test_an_answer_without_chunks_is_read_too() -> None:
    found = answer(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + event("a"), event("b").replace(b"\n", b"\r\n"))
    assert found.text_times == [0.0, 1.0]


def test_empty_text_is_no_token_that_came() -> None:
    assert answer(HEAD + chunk(event(""))).error == "no text came"


def test_a_refusal_and_an_error_in_the_stream_are_told() -> None:
    refused = answer(b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater")
    assert refused.error == "HTTP/1.1 429 Too Many Requests: later"
    broken = answer(HEAD + chunk(event("a")) + chunk(b'data: {"error": {"message": "gone"}}\n\n'))
    assert broken.error is not None
    assert "gone" in broken.error
