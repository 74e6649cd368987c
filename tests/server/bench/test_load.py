"""Runs against live servers: the application with a fake engine, and servers that misbehave."""

import signal

import msgspec
import pytest
import trio

from headrace.core.codec import Codec
from headrace.core.containment import Account
from headrace.hooks.errors import Overloaded, StartError
from headrace.server.bench.gauge import WORDS
from headrace.server.bench.lengths import Fixed, Uniform
from headrace.server.bench.load import run
from headrace.server.bench.settings import Load
from tests.server.bench.odd_server import DONE, FINISH, GOOD, SSE, Nth, odd_server, text, whole
from tests.server.fake_engine import RoleTemplate, WordTokenizer, count_words, inline


async def bench(url, *, progress=lambda record: None, **fields):
    """Run a small load; returns its report and records."""
    fields = {"num_requests": 4, "concurrency": 2, "prompt_tokens": Fixed(tokens=20), "timeout_s": 10.0, **fields}
    fields = {"run_id": "test", "output_tokens": Fixed(tokens=5), **fields}
    with trio.fail_after(20):
        return await run(Load(url=url, **fields), progress=progress)


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_run_counts_what_the_server_used(site, engine, api):
    report, _ = await bench(site.url, api=api, num_requests=6)
    assert (report.num_sent, report.num_complete, report.model) == (6, 6, "fake")
    assert (report.prompt_tokens.mean, report.prompt_tokens.max) == (20, 20)
    assert report.output_tokens.mean == 5
    assert report.tokens_by == "usage"
    assert report.client.num_events > 30


async def test_each_request_has_lengths_of_its_own(site, engine):
    await bench(site.url, prompt_tokens=Uniform(low=10, high=60), output_tokens=Uniform(low=2, high=9), num_requests=8)
    measured = engine.requests[-8:]
    assert len({count_words(request.prompt) for request in measured}) > 4
    assert {request.params.max_tokens for request in measured} <= set(range(2, 10))


async def test_cached_tokens_are_those_of_the_usage(site, engine):
    engine.num_cached = 3
    report, _ = await bench(site.url)
    assert (report.num_cached_tokens, report.cached_tokens.max) == (12, 3)


async def test_further_fields_reach_the_server_and_win(site, engine):
    params = {"temperature": msgspec.Raw(b"0"), "max_tokens": msgspec.Raw(b"2")}
    report, _ = await bench(site.url, params=params, ignore_eos=True)
    assert engine.params[-1] | {"temperature": 0, "max_tokens": 2, "ignore_eos": True} == engine.params[-1]
    assert report.output_tokens.mean == 2


async def test_a_server_with_a_tokenizer_is_asked_for_words_of_one_token(site, engine):
    limits = {"max_model_len": 1000, "max_bytes": 10_000, "vocab_size": 1000}
    accounts = Account("tokenizer", "words", "words"), Account("chat_template", "roles", "roles")
    engine.codec = Codec(WordTokenizer(), RoleTemplate(), accounts=accounts, off_loop=inline, **limits)
    report, _ = await bench(site.url)
    assert (report.gauge.source, report.gauge.num_words) == ("tokenize", len(WORDS))
    # Those of the warm-up and of the run.
    assert len(engine.requests) == 1 + 4


async def test_an_open_loop_sends_all_and_tells_how_late(site):
    report, _ = await bench(site.url, rate=1000.0, concurrency=None, num_requests=10)
    assert report.num_complete == 10
    assert report.client.lag_ms.max >= 0


async def test_warming_and_gauging_are_not_measured(site, engine):
    report, _ = await bench(site.url, num_warmups=3, shared_prefix_tokens=10, num_prefixes=2, warm_prefixes=True)
    assert report.num_sent == 4
    assert len(engine.requests) >= 1 + 3 + 2 + 4
    assert report.prompt_tokens.mean == 30


async def test_a_refusal_is_counted_with_its_status_and_words(site, engine):
    def refuse(record):
        engine.refusal = Overloaded("the line is full", retry_after_s=1)

    report, _ = await bench(site.url, num_requests=3, concurrency=1, progress=refuse)
    assert report.errors == {"http 429": 2}
    assert report.messages["http 429"] == "the line is full"


async def test_an_error_within_a_stream_fails_its_request(site, engine):
    def break_next(record):
        engine.fail_at = 2

    report, records = await bench(site.url, num_requests=2, concurrency=1, progress=break_next)
    assert report.errors == {"error event": 1}
    assert report.messages["error event"] == "it broke"
    assert len(records[1].times) == 2


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9000\r\n\r\n" + text("a"),
            "cut short",
        ),
        (SSE.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n") + b"ff\r\ndata", "cut short"),
        (SSE + text("a"), "cut short"),
        (b"", "cut short"),
        (b"HTTP/1.1 200", "cut short"),
        (b"SSH-2.0-nothing\r\n\r\n", "bad answer"),
        (SSE + b"data: {oops}\n\n", "bad answer"),
        (whole(b'{"error":{"message":"no"}}'), "not a stream"),
        (whole(b'{"error":{"message":"no"}}', status=b"500 Oh"), "http 500"),
        (SSE + FINISH + DONE, "empty"),
    ],
)
async def test_each_way_to_fail_has_its_kind(odd, kind):
    async with odd_server(Nth(odd)) as server:
        report, _ = await bench(server.url, num_requests=2, concurrency=1)
    assert report.errors == {kind: 2}
    assert report.messages[kind] != "" or odd == b""


async def test_a_server_that_does_not_tell_usage_is_measured_by_its_events():
    async with odd_server(GOOD) as server:
        report, _ = await bench(server.url)
    assert report.num_complete == 4
    assert (report.tokens_by, report.num_output_tokens) == ("events", 8)
    assert (report.gauge.source, report.num_prompt_tokens) == ("guess", None)


async def test_usage_alone_tells_what_a_word_is_and_what_stands_around_a_prompt():
    def answer(body: bytes) -> bytes:
        messages = msgspec.json.decode(body)["messages"]
        num_words = sum(len(message["content"].split()) for message in messages)
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":2}}\n\n' % (2 * num_words + 30)
        return SSE + text("a") + text("b") + FINISH + usage + DONE

    async with odd_server(answer) as server:
        report, _ = await bench(server.url, prompt_tokens=Fixed(tokens=130))
    assert (report.gauge.source, report.gauge.tokens_per_word, report.gauge.overhead) == ("usage", 2.0, 30)
    assert report.prompt_tokens.mean == report.prompt_tokens.max == 130


async def test_a_template_without_system_messages_gets_none():
    def answer(body: bytes) -> bytes:
        return whole(b"{}", status=b"400 Bad") if b'"system"' in body else GOOD

    async with odd_server(answer) as server:
        report, _ = await bench(server.url)
    assert report.num_complete == 4


async def test_connections_are_used_again_and_one_that_was_closed_is_replaced():
    good = whole(text("a") + FINISH + DONE, kind=b"text/event-stream")
    async with odd_server(good, closes=False) as server:
        report, _ = await bench(server.url, num_requests=20, concurrency=2)
        assert report.num_complete == 20
        assert server.num_connections == 2
    async with odd_server(good, closes=True) as server:
        report, _ = await bench(server.url, num_requests=5, concurrency=1)
        assert report.num_complete == 5
        assert server.num_connections > 5


async def test_a_request_that_takes_too_long_fails_alone(site, engine):
    def hold(record):
        engine.hold_at = 1

    report, records = await bench(site.url, num_requests=2, concurrency=1, timeout_s=0.5, progress=hold)
    assert report.errors == {"timeout": 1}
    assert len(records[1].times) == 1


async def test_an_interrupt_ends_a_run_and_what_was_complete_is_reported(site, engine):
    def interrupt(record):
        engine.hold_at = 1
        signal.raise_signal(signal.SIGINT)

    report, _ = await bench(site.url, num_requests=100, concurrency=1, progress=interrupt)
    assert report.interrupted
    assert report.num_sent == report.num_complete == 1


async def test_a_server_that_refuses_the_first_request_is_not_measured(site, engine):
    engine.refusal = Overloaded("the line is full", retry_after_s=1)
    with pytest.raises(StartError, match="first request of one token: http 429: the line is full"):
        await bench(site.url)
