"""`/v1/ws`: what is said on a socket, and when it is closed."""

import json
from functools import partial

import pytest
import trio
import trio.testing
from starlette.requests import HTTPConnection

from headrace.hooks.errors import Overloaded
from headrace.hooks.messages import Delta
from headrace.server.websocket import MAX_BAD_MESSAGES, MAX_LIVE, MAX_NOTES, Session
from headrace.server.ws_answer import make_request
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.site import running
from tests.server.wire import read_all
from tests.server.ws_client import connected, frame, handshake, text_of


async def test_a_request_is_answered_with_deltas_and_one_ending(site):
    async with connected(site) as client:
        await client.start("a")
        deltas, ending = await client.answer("a")
    assert text_of(deltas) == " w1 w2 w3"
    assert [delta["seq"] for delta in deltas] == list(range(len(deltas)))
    assert ending["type"] == "done"
    assert ending["reasons"] == ["length"]
    assert ending["usage"]["completion_tokens"] == sum(delta["n"] for delta in deltas) == 3
    assert ending["timings"] == {"prefill_ms": 1.5}


async def test_a_body_of_the_other_route_is_answered_too(site, engine):
    async with connected(site) as client:
        await client.start("a", kind="completion", prompt="one two three")
        deltas, ending = await client.answer("a")
    assert text_of(deltas) == " w1 w2 w3"
    assert ending["usage"]["prompt_tokens"] == 3


async def test_choices_come_apart_and_end_together(site):
    async with connected(site) as client:
        await client.start("a", n=2)
        deltas, ending = await client.answer("a")
    assert [text_of(deltas, choice) for choice in (0, 1)] == [" w1 w2 w3"] * 2
    assert ending["reasons"] == ["length", "length"]


async def test_log_probabilities_come_with_their_tokens(site):
    async with connected(site) as client:
        await client.start("a", kind="completion", logprobs=1)
        deltas, _ = await client.answer("a")
    scored = [of for delta in deltas for of in delta["logprobs"]]
    assert scored[0] == {"token": " w1", "logprob": -9999.0, "top": [[" w1", 1, -0.5]]}
    assert [id for delta in deltas for id in delta["token_ids"]] == [1, 2, 3]
    assert len(scored) == 3


async def test_requests_of_a_socket_run_side_by_side(site, engine):
    engine.hold_at = 1
    async with connected(site) as client:
        for id in "abc":
            await client.start(id)
        first = [await client.receive() for _ in range(3)]
        engine.release.set()
        rest = [await client.receive() for _ in range(3)]
    assert {message["id"] for message in first} == set("abc")
    assert {message["type"] for message in first} == {"delta"}
    assert rest


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_request_error"),
        ({"messages": []}, "messages", "invalid_request_error"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        ({"guided_regex": "x"}, "guided_regex", "unsupported_parameter"),
    ],
)
async def test_a_bad_request_ends_with_its_error_and_the_socket_lives(site, fields, param, code):
    async with connected(site) as client:
        await client.start("a", **fields)
        _, ending = await client.answer("a")
        assert (ending["type"], ending["param"], ending["code"]) == ("error", param, code)
        await client.start("a")
        assert (await client.answer("a"))[1]["type"] == "done"


async def test_a_full_line_refuses_a_request_and_says_when_to_come_back(site, engine):
    engine.refusal = Overloaded("full", retry_after_s=2.0)
    async with connected(site) as client:
        await client.start("a")
        _, ending = await client.answer("a")
    assert (ending["code"], ending["retry_after_s"]) == ("overloaded", 2.0)


async def test_a_request_that_fails_keeps_what_came_before(site, engine):
    engine.fail_at = 2
    async with connected(site) as client:
        await client.start("a")
        deltas, ending = await client.answer("a")
    assert text_of(deltas) == " w1 w2"
    assert (ending["type"], ending["message"]) == ("error", "it broke")


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        '{"type": "begin", "id": "a"}',
        '{"type": "start", "id": "a"}',
        '{"type": "cancel", "id": "a", "x": 1}',
        json.dumps({"type": "cancel", "id": "x" * 65}),
        '{"type": "start", "id": "a", "request": ' + "[" * 100_000,
    ],
)
async def test_what_is_no_message_is_an_error_without_an_id(site, text):
    async with connected(site) as client:
        await client.send_text(text)
        error = await client.receive()
        assert (error["type"], error["id"], error["code"]) == ("error", None, "bad_message")
        await client.send("ping", t=1)
        assert await client.receive() == {"type": "pong", "t": 1}


async def test_several_bad_messages_in_a_row_close_the_socket(site):
    async with connected(site) as client:
        for _ in range(MAX_BAD_MESSAGES + 1):
            await client.send_text("nonsense")
        assert await client.close_code() == 4400


async def test_the_id_of_a_live_request_cannot_be_used_again(site, engine):
    engine.hold_at = 1
    async with connected(site) as client:
        await client.start("a")
        await client.receive()
        await client.start("a")
        error = await client.receive()
        assert (error["id"], error["code"]) == (None, "duplicate_id")
        engine.release.set()
        assert (await client.answer("a"))[1]["type"] == "done"


async def test_too_many_live_requests_are_refused_one_by_one(site, engine):
    engine.hold_at = 0
    async with connected(site) as client:
        for index in range(MAX_LIVE + 1):
            await client.start(str(index))
        _, ending = await client.answer(str(MAX_LIVE))
        assert ending["code"] == "too_many_live"
        engine.release.set()
        assert (await client.answer("0"))[1]["type"] == "done"


async def test_a_cancelled_request_ends_and_its_id_is_free(site, engine):
    engine.hold_at = 1
    async with connected(site) as client:
        await client.start("a")
        await client.receive()
        await client.send("cancel", id="a")
        assert (await client.answer("a"))[1]["code"] == "cancelled"
        assert await engine.wait_closed(1) == [(499, None)]
        engine.release.set()
        await client.start("a")
        assert (await client.answer("a"))[1]["type"] == "done"


async def test_cancelling_what_is_not_there_means_nothing(site):
    async with connected(site) as client:
        await client.send("cancel", id="never")
        await client.send("ping", t=0.5)
        assert await client.receive() == {"type": "pong", "t": 0.5}


async def test_a_binary_frame_closes_the_socket(site):
    async with connected(site) as client:
        await client.stream.send_all(frame(2, b"{}"))
        assert await client.close_code() == 1003


async def test_a_client_that_leaves_cancels_all_its_requests(site, engine):
    engine.hold_at = 1
    async with connected(site) as client:
        for id in "abc":
            await client.start(id)
            await client.receive()
    assert await engine.wait_closed(3) == [(499, None)] * 3


async def test_a_client_that_says_goodbye_is_answered(site):
    async with connected(site) as client:
        await client.stream.send_all(frame(8, (1000).to_bytes(2, "big")))
        assert await client.close_code() == 1000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"protocol": None}, 400),
        ({"protocol": "graphql-ws"}, 400),
        ({"Origin": "https://elsewhere.example"}, 403),
    ],
)
async def test_a_handshake_is_refused_with_an_error_object(site, headers, status):
    async with await site.connect() as stream:
        await stream.send_all(handshake(**headers))
        response = await read_all(stream)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("origin", ["http://x", "https://friend.example"])
async def test_pages_of_the_server_and_of_listed_origins_may_connect(engine, origin):
    async with (
        running(engine, cors_origins=["https://friend.example"]) as site,
        connected(site, Origin=origin) as client,
    ):
        await client.start("a")
        assert (await client.answer("a"))[1]["type"] == "done"


async def test_a_server_that_loads_refuses_the_handshake():
    engine = FakeEngine(state="loading")
    engine.loaded = trio.Event()
    async with running(engine) as site:
        async with await site.connect() as stream:
            await stream.send_all(handshake())
            assert (await read_all(stream)).startswith(b"HTTP/1.1 503 ")
        engine.loaded.set()
        await engine.ready.wait()


async def test_a_drain_ends_live_requests_and_then_closes_the_sockets(engine):
    engine.hold_at = 1
    async with running(engine, drain_s=0.1) as site, connected(site) as idle, connected(site) as client:
        await client.start("a")
        await client.receive()
        await engine.drain(0.05)
        _, ending = await client.answer("a")
        assert (ending["type"], ending["code"]) == ("error", "unavailable")
        assert await client.close_code() == 1001
        assert await idle.close_code() == 1001


async def test_a_request_on_a_draining_server_is_refused(engine):
    engine.hold_at = 1
    async with running(engine) as site, connected(site) as client:
        await client.start("a")
        await client.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.drain, 5)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.start("b")
            assert (await client.answer("b"))[1]["code"] == "unavailable"
            engine.release.set()
            assert (await client.answer("a"))[1]["type"] == "done"


async def test_a_socket_that_is_not_read_parks_its_requests_and_no_others(engine):
    engine.word = lambda token_id: "x" * 20_000
    async with running(engine, write_timeout_s=60) as site, connected(site, 4096) as slow, connected(site) as quick:
        for id in "ab":
            await slow.start(id, max_tokens=128)
        await quick.start("c", max_tokens=128)
        deltas, _ = await quick.answer("c")
        assert len(text_of(deltas)) == 128 * 20_000
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert [request.mailbox.parked for request in engine.requests if not request.mailbox.closed] == [True, True]
        deltas, _ = await slow.answer("a")
        assert len(text_of(deltas)) == 128 * 20_000


async def test_a_request_of_a_socket_that_is_not_read_can_be_cancelled(engine):
    engine.word = lambda token_id: "x" * 20_000
    async with running(engine, write_timeout_s=60) as site, connected(site, 4096) as slow:
        await slow.start("a", max_tokens=128)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await slow.send("cancel", id="a")
        assert await engine.wait_closed(1) == [(499, None)]
        assert (await slow.answer("a"))[1]["code"] == "cancelled"


class Gate:
    """The ASGI side of a socket that takes one frame whenever a test lets it."""

    def __init__(self) -> None:
        self.sent: list[dict[str, object]] = []
        self.let = trio.Semaphore(0)
        self.put, self.events = trio.open_memory_channel[dict[str, object]](100)
        self.receive = self.events.receive

    async def send(self, message: dict[str, object]) -> None:
        await self.let.acquire()
        self.sent.append(json.loads(message["text"]) if "text" in message else message)

    async def take(self, num_frames: int) -> list[dict[str, object]]:
        taken = len(self.sent)
        for _ in range(num_frames):
            self.let.release()
        await trio.testing.wait_all_tasks_blocked()
        return self.sent[taken:]


@pytest.fixture
async def gate(engine, nursery):
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    engine.hold_at = 0
    gate = Gate()
    handshake = HTTPConnection({"type": "websocket", "headers": []})
    make = partial(make_request, engine, lambda name: INFO, handshake)
    nursery.start_soon(Session(engine, make, gate.receive, gate.send).run)
    for id in ("greedy", "b", "c"):
        body = {"messages": [{"role": "user", "content": id}]}
        gate.put.send_nowait(
            {"type": "websocket.receive", "text": json.dumps({"type": "start", "id": id, "request": body})}
        )
        await trio.testing.wait_all_tasks_blocked()
    return gate


async def test_requests_take_turns_however_much_one_has_to_say(gate, engine):
    mailboxes = [request.mailbox for request in engine.requests]
    for _ in range(6):
        for _ in range(50):
            mailboxes[0].put(Delta(text="x" * 1000, num_tokens=1))
        for mailbox in mailboxes[1:]:
            mailbox.put(Delta(text="y", num_tokens=1))
        await trio.testing.wait_all_tasks_blocked()
        # One is with the writer already; each other waits for one more of the greedy one at most.
        assert {message["id"] for message in await gate.take(4)} == {"greedy", "b", "c"}


async def test_what_piled_up_goes_out_as_one_delta(gate, engine):
    for text in "abcdef":
        engine.requests[1].mailbox.put(Delta(text=text, num_tokens=1))
    first, *rest = await gate.take(6)
    whole = text_of([first, *rest])
    assert whole == "abcdef"
    assert len(rest) <= 1
    assert first["n"] + sum(delta["n"] for delta in rest) == 6


async def test_tokens_without_text_are_counted_with_what_follows_them(gate, engine):
    put = engine.requests[1].mailbox.put
    put(Delta(num_tokens=1))
    await trio.testing.wait_all_tasks_blocked()
    put(Delta(text="a", num_tokens=1))
    (delta,) = await gate.take(5)
    assert (delta["text"], delta["n"]) == ("a", 2)


async def test_a_socket_that_takes_nothing_holds_one_handful_a_request(gate, engine):
    for _ in range(200):
        for request in engine.requests:
            request.mailbox.put(Delta(text="x" * 1000, num_tokens=1))
        await trio.testing.wait_all_tasks_blocked()
    assert all(request.mailbox.parked for request in engine.requests)
    assert gate.sent == []


async def test_messages_whose_answers_are_not_read_close_the_socket(gate):
    for _ in range(4 * MAX_NOTES):
        gate.put.send_nowait({"type": "websocket.receive", "text": '{"type": "ping", "t": 1}'})
        await trio.testing.wait_all_tasks_blocked()
        if gate.events.statistics().current_buffer_used:
            break  # Nobody receives any more.
    assert (await gate.take(4 * MAX_NOTES))[-1]["code"] == 4429


async def test_an_answer_cut_short_ends_with_an_error(site, engine):
    engine.hold_at = 1
    async with connected(site) as client:
        await client.start("a")
        await client.receive()
        engine.requests[0].mailbox.close()
        assert (await client.answer("a"))[1]["message"] == "the answer ended before its last part"
