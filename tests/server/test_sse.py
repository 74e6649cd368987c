"""What goes into one write of a stream."""

import json

from headrace.hooks.messages import Delta, FinishReason, TextPrompt, Usage
from headrace.server.completion_format import CompletionFormat
from headrace.server.sse import MAX_WRITE_BYTES, Events
from tests.server.fake_engine import FakeEngine


def events_of(engine: FakeEngine, **params: object) -> Events:
    request = engine.request(TextPrompt(text="x"), params)
    format = CompletionFormat(id="cmpl-1", created=1, model="fake", fingerprint="fp", token_text=engine.token_text)
    return Events(engine, request, format)


def texts(out: bytes) -> list[str]:
    chunks = [json.loads(part.removeprefix(b"data: ")) for part in out.split(b"\n\n") if part and b"[DONE]" not in part]
    return [chunk["choices"][0]["text"] for chunk in chunks]


async def test_deltas_that_piled_up_go_into_one_write(engine):
    events = events_of(engine)
    for text in "abc":
        engine.requests[0].mailbox.put(Delta(text=text))
    assert texts(await events.next()) == ["a", "b", "c"]


async def test_a_write_has_a_bound(engine):
    events = events_of(engine)
    for _ in range(10):
        engine.requests[0].mailbox.put(Delta(text="x" * 5000))
    assert MAX_WRITE_BYTES <= len(await events.next()) < MAX_WRITE_BYTES + 6000
    assert len(engine.requests[0].mailbox) == 6


async def test_a_delta_without_anything_to_see_makes_no_event(engine):
    events = events_of(engine)
    engine.requests[0].mailbox.put(Delta(num_tokens=1))
    assert await events.next() == b""
    assert not events.ended


async def test_the_stream_ends_when_all_choices_have_finished_wherever_the_usage_came(engine):
    events = events_of(engine, n=2)
    put = engine.requests[0].mailbox.put
    put(Delta(choice=0, text="a", finish=FinishReason.STOP, usage=Usage(prompt=1, completion=2, cached=0)))
    assert not (await events.next()).endswith(b"[DONE]\n\n")
    put(Delta(choice=1, text="b", finish=FinishReason.STOP))
    assert (await events.next()).endswith(b"[DONE]\n\n")
    assert events.ended


async def test_an_answer_that_breaks_off_does_not_end_well(engine):
    events = events_of(engine)
    engine.requests[0].mailbox.close()
    out = await events.next()
    assert b'{"error":' in out
    assert b"[DONE]" not in out
