"""Hostile HTTP/2 inputs. After each, an ordinary request succeeds, mostly on the same connection."""

import h2.events
import h2.settings
import pytest
import trio
from hyperframe.frame import DataFrame, PriorityFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from tests.server.site import running
from tests.server.wire import CHAT_BODY, STREAM_BODY, H2Client, read_all


@pytest.fixture
async def h2_client(site):
    stream = await site.connect()
    client = H2Client(stream)
    await client.flush()
    yield client
    await stream.aclose()


async def ask(client, body=CHAT_BODY):
    """An ordinary request on the same connection."""
    stream_id = await client.request(body)
    await client.until(h2.events.StreamEnded, stream_id)
    return client.body(stream_id)


async def status(client, stream_id):
    event = await client.until(h2.events.ResponseReceived, stream_id)
    return dict(event.headers)[b":status"]


async def test_ordinary_requests_work(h2_client):
    assert b"w1 w2" in await ask(h2_client)
    assert (await ask(h2_client, STREAM_BODY)).endswith(b"data: [DONE]\n\n")


async def test_data_after_an_early_answer_is_dropped(h2_client, site):
    stream_id = await h2_client.open(path=b"/nowhere")
    h2_client.connection.send_data(stream_id, b"x" * 10)
    await h2_client.flush()
    for _ in range(20):
        h2_client.connection.send_data(stream_id, b"x" * 1000)
    h2_client.connection.send_data(stream_id, b"", end_stream=True)
    await h2_client.flush()
    assert await status(h2_client, stream_id) == b"404"
    await h2_client.stream.send_all(DataFrame(stream_id, data=b"late", flags=[]).serialize())
    assert await site.works()


async def test_data_after_a_refusal_for_its_size_leaves_the_connection_open(engine):
    async with running(engine, max_body_bytes=10) as site:
        client = H2Client(await site.connect())
        stream_id = await client.open()
        for _ in range(4):
            client.connection.send_data(stream_id, b"x" * 10_000)
        client.connection.end_stream(stream_id)
        await client.flush()
        assert await status(client, stream_id) == b"413"
        await client.stream.aclose()


@pytest.mark.parametrize("path", [b"/\xff", b"/%ff", b"*", b"/" + b"a" * 20_000])
async def test_a_strange_path_ends_one_stream(h2_client, path):
    stream_id = await h2_client.open(path=path, end=True)
    await h2_client.until((h2.events.StreamReset, h2.events.ResponseReceived), stream_id)
    assert b"w1" in await ask(h2_client)


async def test_connect_ends_one_stream(h2_client):
    stream_id = h2_client.connection.get_next_available_stream_id()
    headers = [(b":method", b"CONNECT"), (b":authority", b"example.com:443")]
    h2_client.connection.send_headers(stream_id, headers)
    await h2_client.flush()
    await h2_client.until(h2.events.StreamReset, stream_id)
    assert b"w1" in await ask(h2_client)


async def test_a_websocket_over_http2_ends_one_stream(h2_client):
    await ask(h2_client)  # By now both sides have agreed on their settings.
    stream_id = h2_client.connection.get_next_available_stream_id()
    headers = [(b":method", b"CONNECT"), (b":protocol", b"websocket"), (b":path", b"/"), (b":scheme", b"http")]
    h2_client.connection.send_headers(stream_id, [*headers, (b":authority", b"x"), (b"sec-websocket-version", b"13")])
    await h2_client.flush()
    await h2_client.until(h2.events.StreamReset, stream_id)
    assert b"w1" in await ask(h2_client)


async def test_a_request_that_is_reset_at_once_is_cancelled(h2_client, site, engine):
    engine.hold_at = 1
    stream_id = await h2_client.request(STREAM_BODY)
    await h2_client.until(h2.events.DataReceived, stream_id)
    h2_client.connection.reset_stream(stream_id)
    await h2_client.flush()
    assert await engine.wait_closed(1) == [(499, None)]
    assert await site.works()


async def test_a_thousand_streams_opened_and_reset_in_one_write_do_no_harm(h2_client, site):
    for _ in range(1000):
        stream_id = h2_client.connection.get_next_available_stream_id()
        headers = [(b":method", b"POST"), (b":path", b"/v1/completions"), (b":scheme", b"http"), (b":authority", b"x")]
        h2_client.connection.send_headers(stream_id, headers)
        h2_client.connection.reset_stream(stream_id)
    await h2_client.flush()
    assert await site.works()


FORGED = {
    "a window overflow": WindowUpdateFrame(0, window_increment=2**31 - 1).serialize() * 2,
    "a stream window overflow": WindowUpdateFrame(1, window_increment=2**31 - 1).serialize(),
    "a priority on itself": PriorityFrame(1, depends_on=1, stream_weight=10).serialize(),
    "a priority on the unknown": PriorityFrame(99, depends_on=77, stream_weight=10).serialize(),
    "two thousand priorities": b"".join(
        PriorityFrame(number, depends_on=0, stream_weight=10).serialize() for number in range(1001, 5001, 2)
    ),
    "a priority cycle": PriorityFrame(3, depends_on=5).serialize() + PriorityFrame(5, depends_on=3).serialize(),
    "a reset of the unknown": RstStreamFrame(41).serialize(),
    "data on the unknown": DataFrame(41, data=b"x").serialize(),
    "data on stream 0": b"\x00\x00\x01\x00\x00\x00\x00\x00\x00x",
    "a huge frame": b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "junk": b"junk" * 1000,
    "a tiny window": SettingsFrame(0, settings={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}).serialize(),
    "settings out of range": SettingsFrame(0, settings={h2.settings.SettingCodes.MAX_FRAME_SIZE: 1}).serialize(),
}


@pytest.mark.parametrize("frames", FORGED.values(), ids=FORGED)
async def test_forged_frames_do_no_harm(h2_client, site, engine, frames):
    engine.hold_at = 1
    await h2_client.request(STREAM_BODY)
    await engine.held.wait()
    await h2_client.stream.send_all(frames)
    engine.release.set()
    assert await site.works()
    h2_client.stream.socket.shutdown(trio.socket.SHUT_WR)
    await read_all(h2_client.stream)
    assert await site.works()


async def test_a_closed_window_holds_the_stream_back_and_others_go_on(h2_client, site, engine):
    engine.word = lambda token_id: "x" * 20_000
    engine.mailbox_deltas = 2
    h2_client.auto_window = False
    body = STREAM_BODY.replace(b'"max_tokens": 2', b'"max_tokens": 100')
    stream_id = await h2_client.request(body)
    await h2_client.until(h2.events.DataReceived, stream_id)
    with trio.fail_after(5):
        while not engine.requests[0].mailbox.parked:
            await trio.testing.wait_all_tasks_blocked()
    assert await site.works()
    assert engine.requests[0].mailbox.parked


async def test_a_window_that_stays_closed_ends_the_stream(engine):
    async with running(engine, write_timeout_s=0.2) as site:
        engine.word = lambda token_id: "x" * 20_000
        client = H2Client(await site.connect())
        client.auto_window = False
        stream_id = await client.request(STREAM_BODY.replace(b'"max_tokens": 2', b'"max_tokens": 100'))
        await client.until(h2.events.StreamReset, stream_id)
        assert await engine.wait_closed(1) == [(499, None)]
        await client.stream.aclose()
