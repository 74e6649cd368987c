"""Clients that leave, half-close, read late or not at all."""

from contextlib import suppress

import httpx
import pytest
import trio
import trio.testing

from headrace.server.app import create_app
from headrace.server.metrics import Metrics
from tests.server.site import running
from tests.server.wire import post, read_all, read_until, reset


@pytest.mark.parametrize("leave", [reset, lambda stream: stream.socket.close()], ids=["RST", "FIN"])
async def test_a_client_that_leaves_a_stream_cancels_it(site, engine, leave):
    engine.hold_at = 2
    async with await site.connect() as stream:
        await stream.send_all(post(stream=True))
        await read_until(stream, b" w2")
        leave(stream)
        assert await engine.wait_closed(1) == [(499, None)]
        assert engine.requests[0].cancelled


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_cancels_its_request(site, engine, streamed):
    engine.hold_at = 0
    async with await site.connect() as stream:
        await stream.send_all(post(stream=streamed))
        await engine.held.wait()
        reset(stream)
        assert await engine.wait_closed(1) == [(499, None)]


async def test_a_client_that_leaves_while_its_plain_answer_is_computed_cancels_it(site, engine):
    engine.hold_at = 5
    async with await site.connect() as stream:
        await stream.send_all(post(stream=False))
        await engine.held.wait()
        await stream.aclose()
        assert await engine.wait_closed(1) == [(499, None)]


async def test_a_client_that_closes_its_sending_half_counts_as_gone(site, engine):
    engine.hold_at = 1
    async with await site.connect() as stream:
        await stream.send_all(post(stream=True))
        await read_until(stream, b" w1")
        await stream.send_eof()
        assert await engine.wait_closed(1) == [(499, None)]
        await read_all(stream)


@pytest.mark.parametrize("leave", [reset, lambda stream: stream.socket.close()], ids=["RST", "FIN"])
async def test_a_pipelined_request_does_not_hide_that_the_client_left(site, engine, leave):
    engine.hold_at = 0
    async with await site.connect() as stream:
        await stream.send_all(post(stream=False) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await engine.held.wait()
        leave(stream)
        assert await engine.wait_closed(1) == [(499, None)]


async def test_pipelined_requests_are_answered_in_their_order(site, engine):
    async with await site.connect() as stream:
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3 + post(stream=False))
        answers = await read_until(stream, b"chat.completion")
    assert answers.count(b"HTTP/1.1 200") == 4


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(site, engine):
    async with await site.connect() as stream:
        await stream.send_all(post()[:-5])
        reset(stream)
        assert await site.works()
        assert len(engine.requests) == 1


async def test_a_finished_stream_is_closed_as_good(site, engine):
    assert (await site.chat(stream=True)).text.endswith("data: [DONE]\n\n")
    assert await engine.wait_closed(1) == [(200, None)]


async def test_a_client_that_does_not_read_blocks_its_own_request_and_no_other(engine):
    async with running(engine, write_timeout_s=60, drain_s=0.2) as site:
        engine.word = lambda token_id: "x" * 4000
        engine.mailbox_deltas = 2
        async with await site.connect(receive_buffer=4096) as stream:
            await stream.send_all(post(stream=True, max_tokens=128))
            await read_until(stream, b"x")
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert engine.requests[0].mailbox.parked
            assert await site.works()
            assert engine.requests[0].mailbox.parked
            await read_until(stream, b"data: [DONE]\n\n")
            assert (await engine.wait_closed(2))[-1] == (200, None)


async def test_a_client_that_never_reads_is_cut_after_the_write_timeout(engine):
    async with running(engine, write_timeout_s=0.2) as site:
        engine.word = lambda token_id: "x" * 40_000
        async with await site.connect(receive_buffer=4096) as stream:
            await stream.send_all(post(stream=True, max_tokens=128))
            assert await engine.wait_closed(1) == [(499, None)]


async def test_a_client_that_never_reads_does_not_hold_up_the_end_of_the_server(engine):
    engine.word = lambda token_id: "x" * 40_000
    with trio.fail_after(5):
        async with running(engine, write_timeout_s=60, drain_s=0.1) as site:
            stream = await site.connect(receive_buffer=4096)
            await stream.send_all(post(stream=True, max_tokens=128))
            await read_until(stream, b"x")
        assert (await engine.wait_closed(1))[0][0] in (499, 503)
    await stream.aclose()


async def test_a_silent_stream_sends_comments(engine):
    engine.hold_at = 1
    async with running(engine, ping_s=0.05) as site, await site.connect() as stream:
        await stream.send_all(post(stream=True))
        await read_until(stream, b" w1")
        for _ in range(2):
            await read_until(stream, b": ping\n\n")
        engine.release.set()
        await read_until(stream, b"[DONE]")


async def test_a_stream_whose_first_token_is_late_begins_with_a_comment(engine):
    engine.hold_at = 0
    async with running(engine, ping_s=0.05) as site, await site.connect() as stream:
        await stream.send_all(post(stream=True))
        assert b"200" in await read_until(stream, b": ping\n\n")
        engine.release.set()
        await read_until(stream, b"[DONE]")


async def test_a_kept_connection_serves_the_next_request(site):
    async with await site.connect() as stream:
        for _ in range(3):
            await stream.send_all(post(stream=True, max_tokens=1))
            await read_until(stream, b"0\r\n\r\n")


async def test_a_body_that_stops_arriving_is_refused_in_time(engine, nursery):
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    app = create_app(engine, Metrics(), max_body_bytes=1000, ping_s=15, body_timeout_s=0.05)

    async def body():
        yield b"{"
        await trio.sleep_forever()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.post("/v1/completions", content=body())
    assert answer.status_code == 408


async def test_a_body_far_over_the_limit_gets_a_whole_answer(engine):
    async with running(engine, max_body_bytes=10_000) as site:
        answer = await site.client.post("/v1/completions", content=b"x" * 8_000_000)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


async def test_a_body_without_end_gets_its_answer_and_its_connection_is_closed(engine, nursery):
    async with running(engine, max_body_bytes=10_000) as site, await site.connect() as stream:

        async def send_for_ever():
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
                while True:
                    await stream.send_all(b"10000\r\n" + b"x" * 65536 + b"\r\n")

        nursery.start_soon(send_for_ever)
        assert b" 413 " in await read_all(stream)
        assert await site.works()
