"""What a request or a connection may measure at most, and what a full line says."""

import json
import time

import h2.events
import pytest
import trio

from headrace.core.credits import Credits
from headrace.core.mailbox import Mailbox
from headrace.core.timeline import Timeline
from headrace.hooks.errors import BadRequest
from headrace.hooks.messages import Request, TokenPrompt
from headrace.hooks.params import Extension, SamplingParams
from headrace.server.limits import check_nesting, timeout_s
from tests.server.fake_engine import FakeEngine
from tests.server.site import running
from tests.server.wire import H2Client, read_all

# ── headers ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_too_many_header_fields_are_431(engine):
    async with running(engine, max_headers=20) as site:
        answer = await site.client.get("/health", headers={f"x-{index}": "1" for index in range(20)})
        assert answer.status_code == 431
        assert "at most 20 header fields" in answer.json()["error"]["message"]
        assert await site.works()


async def test_header_fields_may_be_as_large_as_the_setting_says(engine):
    async with running(engine, max_header_bytes=4000) as site:
        assert (await site.client.get("/health", headers={"x-long": "x" * 3000})).status_code == 200


async def test_a_header_larger_than_the_setting_is_refused_and_the_server_lives(engine):
    async with running(engine, max_header_bytes=4000) as site:
        async with await site.connect() as stream:
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 8000)
            assert (await read_all(stream)).startswith(b"HTTP/1.1 431")
        assert await site.works()


async def test_http2_has_the_same_limits(engine):
    async with running(engine, max_headers=4) as site, await site.connect() as stream:
        client = H2Client(stream)
        stream_id = client.connection.get_next_available_stream_id()
        names = [(b":method", b"GET"), (b":path", b"/health"), (b":scheme", b"http"), (b":authority", b"x")]
        client.connection.send_headers(stream_id, names + [(b"x-%d" % i, b"1") for i in range(9)], end_stream=True)
        await client.flush()
        await client.until(h2.events.StreamEnded, stream_id)
        assert b"headers_too_large" in client.body(stream_id)


# ── nesting ───────────────────────────────────────────────────────────────────────────────────────────────────────


def nested(depth: int, inside: str = "", kind: str = "[]") -> bytes:
    opening = "[" if kind == "[]" else '{"a":'
    return (opening * depth + (inside or "0") + kind[1] * depth).encode()


@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_nesting_may_reach_the_limit_and_not_one_more(kind):
    check_nesting(nested(10, kind=kind), 10)
    with pytest.raises(BadRequest, match="nested at most 10 deep"):
        check_nesting(nested(11, kind=kind), 10)


def test_arrays_and_objects_count_together():
    check_nesting(b'[{"a":' * 5 + b"0" + b"}]" * 5, 10)
    with pytest.raises(BadRequest):
        check_nesting(b'[{"a":' * 6 + b"0" + b"}]" * 6, 10)


def test_many_shallow_arrays_are_no_nesting():
    check_nesting(json.dumps([[[index, {"a": []}]] for index in range(1000)]).encode(), 5)


def test_a_deep_place_behind_shallow_ones_is_found():
    with pytest.raises(BadRequest):
        check_nesting(b"[" + b"[],[[]]," * 500 + nested(10) + b"]", 10)


@pytest.mark.parametrize("text", ["[" * 1000, '\\"' + "[{" * 1000, "\\\\", 'quoted " and [ and {' * 100])
def test_brackets_in_strings_do_not_count(text):
    check_nesting(json.dumps({"text": text, "more": [[]] * 20}).encode(), 5)


def test_a_hostile_body_is_found_out_quickly():
    body = b"[[]," * 1_000_000
    started = time.perf_counter()
    with pytest.raises(BadRequest):
        check_nesting(body)
    assert time.perf_counter() - started < 2


async def test_a_body_that_is_nested_too_deeply_is_400(client):
    body = b'{"messages":' + nested(200) + b"}"
    answer = await client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert "nested" in answer.json()["error"]["message"]


# ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_connection_too_many_is_told_and_closed_and_a_place_comes_back(engine):
    async with running(engine, max_connections=2) as site:
        first, second = await site.connect(), await site.connect()
        for stream in (first, second):
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await stream.receive_some()
        async with await site.connect() as third:
            assert b"503 Service Unavailable" in await read_all(third)
        await first.aclose()
        with trio.fail_after(5):
            while not await answers(site):
                await trio.lowlevel.checkpoint()
        await second.aclose()


async def answers(site) -> bool:
    async with await site.connect() as stream:
        try:
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            return (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        except trio.BrokenResourceError:
            return False


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("header", "asked_s", "asked_ms", "seconds"),
    [
        (None, None, None, None),
        ("1500", None, None, 1.5),
        (None, 2.5, None, 2.5),
        (None, None, 250, 0.25),
        ("1500", 1.0, 3000, 1.0),
        ("10", 1.0, 3000, 0.01),
    ],
)
def test_the_shortest_timeout_counts(header, asked_s, asked_ms, seconds):
    headers = {} if header is None else {"x-request-timeout-ms": header}
    asked = Extension(timeout_s=asked_s, timeout_ms=asked_ms)
    assert timeout_s(headers, asked.allowed_s) == seconds


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "soon", "", "inf", "99999999999999"])
def test_a_timeout_that_is_none_is_refused_by_name(text):
    with pytest.raises(BadRequest, match="x-request-timeout-ms") as caught:
        timeout_s({"x-request-timeout-ms": text}, None)
    assert caught.value.param == "x-request-timeout-ms"


@pytest.mark.parametrize(
    ("headers", "extension"), [({"x-request-timeout-ms": "1500"}, None), ({}, {"timeout_ms": 1500})]
)
async def test_the_engine_gets_a_requests_timeout(client, engine, headers, extension):
    body = {"messages": [{"role": "user", "content": "hi"}], **({"headrace": extension} if extension else {})}
    assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    assert [call["timeout_s"] for call in engine.calls] == [1.5]


# ── a full line ───────────────────────────────────────────────────────────────────────────────────────────────────


class Crowded(FakeEngine):
    """Has the line's own credits for its places."""

    def __init__(self, max_sequences: int) -> None:
        super().__init__()
        self.credits = Credits(max_sequences=max_sequences, max_tokens=10_000)

    async def submit(self, request: Request) -> None:
        if not self.credits.take(request):
            raise self.credits.refusal()
        await super().submit(request)

    def close(self, request: Request, **rest: object) -> dict[str, object]:
        self.credits.release(request)
        return super().close(request, **rest)


async def test_a_request_too_many_is_429_with_seconds_to_wait_and_the_others_go_on(nursery):
    engine = Crowded(max_sequences=2)
    engine.hold_at = 1
    answered = []

    async def ask(site) -> None:
        answered.append((await site.chat()).status_code)

    async with running(engine) as site:
        async with trio.open_nursery() as asking:
            for _ in range(2):
                asking.start_soon(ask, site)
            await engine.held.wait()
            while len(engine.credits) < 2:
                await trio.lowlevel.checkpoint()
            refused = await site.chat()
            engine.release.set()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert answered == [200, 200]
        await engine.wait_closed(3)  # A place comes back with the request's close, which its client may precede.
        assert await site.works()


async def test_retry_after_is_the_backlog_over_the_rate(autojump_clock):
    credits = Credits(max_sequences=30, max_tokens=10_000)

    def come() -> Request:
        request = Request(
            id="r",
            prompt=TokenPrompt(token_ids=(1,)),
            params=SamplingParams(),
            chain=(),
            mailbox=Mailbox(max_deltas=4, num_choices=1),
            timeline=Timeline(),
        )
        assert credits.take(request)
        return request

    live = [come() for _ in range(30)]
    for request in live[:10]:  # Ten leave, one each two seconds.
        credits.release(request)
        await trio.sleep(2)
    assert credits.refusal().retry_after_s == 40  # 20 are left.


def test_a_string_that_never_ends_is_measured_in_one_pass():
    # Quadratic, this took minutes, and nothing else ran meanwhile.
    with pytest.raises(BadRequest):
        check_nesting(b"[" * 101 + b'"\\' * 1_000_000)


def test_only_brackets_outside_of_strings_and_within_each_other_count():
    check_nesting(b"[" + (b"[" * 99 + b"]" * 99) * 1000 + b"]")
    check_nesting(b'["' + b"[" * 500 + b'\\"' + b"[" * 500 + b'"]')
    with pytest.raises(BadRequest):
        check_nesting(b'{"a":' * 101 + b"1" + b"}" * 101)
