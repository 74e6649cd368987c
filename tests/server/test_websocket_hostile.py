"""Hostile WebSocket clients. Whatever they send harms their own socket only, and an ordinary request then succeeds."""

from contextlib import suppress
from functools import partial

import pytest
import trio
from hypercorn.trio import serve as hypercorn_serve

from headrace.hooks.config import Server
from headrace.server.hardening import WriteLimit, install
from headrace.server.serve import hypercorn_config, listen
from headrace.server.websocket import WebSockets
from tests.server.fake_engine import INFO
from tests.server.site import Site
from tests.server.wire import read_all, reset
from tests.server.ws_client import Client, Closed, connected, frame, handshake

MIB = 2**20
PROTOCOL_ERROR, BAD_TEXT, TOO_BIG, NO_ANSWER = 1002, 1007, 1009, 1006

FRAMES = {
    "a bad opcode": (frame(3, b"x"), PROTOCOL_ERROR),
    "a bad control opcode": (frame(11, b"x"), PROTOCOL_ERROR),
    "an unmasked frame": (frame(1, b"{}", masked=False), PROTOCOL_ERROR),
    "a reserved bit": (frame(1, b"{}", rsv=1), PROTOCOL_ERROR),
    "text that was compressed without leave": (frame(1, b"\xaaV*\xa9,H\x05\x00", rsv=4), PROTOCOL_ERROR),
    "text that is no UTF-8": (frame(1, b"\xff\xfe"), BAD_TEXT),
    "a surrogate": (frame(1, b"\xed\xa0\x80"), BAD_TEXT),
    "a continuation of nothing": (frame(0, b"x"), PROTOCOL_ERROR),
    "a message inside a message": (frame(1, b"x", fin=False) + frame(1, b"y"), PROTOCOL_ERROR),
    "a ping in fragments": (frame(9, b"x", fin=False), PROTOCOL_ERROR),
    "a ping too long": (frame(9, b"x" * 126), PROTOCOL_ERROR),
    "a close without a whole code": (frame(8, b"\x03"), PROTOCOL_ERROR),
    "a close with a code that is none": (frame(8, b"\x00\x01"), PROTOCOL_ERROR),
    "a message too large": (frame(1, b"x" * (MIB + 1)), TOO_BIG),
    "a message too large, in pieces": (frame(1, b"x", fin=False) + frame(0, b"y" * 65535, fin=False) * 17, TOO_BIG),
}


@pytest.fixture
async def bystander(site, engine):
    """A socket in the middle of an answer."""
    engine.hold_at = 1
    async with connected(site) as client:
        await client.start("bystander")
        assert (await client.receive())["type"] == "delta"
        yield client


async def check_only_the_socket_is_harmed(site: Site, bystander: Client) -> None:
    site.engine.release.set()
    _, ending = await bystander.answer("bystander")
    assert ending["type"] == "done"
    assert await site.works()


@pytest.mark.parametrize(("data", "code"), FRAMES.values(), ids=FRAMES)
async def test_a_frame_that_breaks_the_rules_closes_its_socket(site, engine, bystander, data, code):
    async with connected(site) as client:
        await client.start("own")
        await client.receive()
        with suppress(trio.BrokenResourceError):  # The server may be quicker.
            await client.stream.send_all(data)
        assert await client.close_code() in (code, NO_ANSWER)  # What is left unread may cut what is said last.
        assert await engine.wait_closed(1) == [(499, None)]
    await check_only_the_socket_is_harmed(site, bystander)


@pytest.mark.parametrize("data", [frame(3, b"x"), frame(1, b"\xff")], ids=["opcode", "text"])
async def test_the_client_is_told_which_rule_it_broke(site, data):
    async with connected(site) as client:
        await client.stream.send_all(data)
        with pytest.raises(Closed) as closed:
            await client.receive()
    assert closed.value.code in (PROTOCOL_ERROR, BAD_TEXT)
    assert closed.value.args[1]


FLOODS = {
    "pings": frame(9, b"") * 1000,
    "empty fragments": frame(0, b"", fin=False) * 1000,
    "one byte after the other": frame(0, b"x", fin=False) * 1000,
    "pongs": frame(10, b"") * 1000,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_of_tiny_frames_leaves_others_their_turn(site, engine, bystander, flood):
    async with connected(site) as client, trio.open_nursery() as nursery:

        async def pour() -> None:
            await client.stream.send_all(frame(1, b"x", fin=False))
            while True:
                await client.stream.send_all(flood)

        nursery.start_soon(pour)
        for _ in range(3):
            assert await site.works()
        await check_only_the_socket_is_harmed(site, bystander)
        nursery.cancel_scope.cancel()


async def test_others_run_between_the_frames_of_a_flood(site, nursery):
    num_frames, num_turns = 3000, 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await trio.lowlevel.checkpoint()
            num_turns += 1

    async with connected(site) as client:
        nursery.start_soon(count_turns)
        await client.stream.send_all(frame(9, b"") * num_frames)
        num_bytes = 0
        while num_bytes < 2 * num_frames:
            num_bytes += len(await client.stream.receive_some(65536))
        assert num_turns >= num_frames
        nursery.cancel_scope.cancel()


async def test_a_message_without_end_is_given_up_at_its_limit(site, engine, bystander):
    """Its length says 4 EiB."""
    async with connected(site) as client:
        head = bytes([0x81, 0xFF]) + (2**62).to_bytes(8, "big") + b"mask"
        num_sent = 0
        with suppress(trio.BrokenResourceError):
            await client.stream.send_all(head)
            while num_sent < 64 * MIB:
                await client.stream.send_all(bytes(65536))
                num_sent += 65536
        assert num_sent < 16 * MIB  # Its limit, and what the kernel holds.
    await check_only_the_socket_is_harmed(site, bystander)


@pytest.mark.parametrize("end", ["FIN", "RST"])
@pytest.mark.parametrize("data", [b"", frame(1, b'{"type"', fin=False), frame(1, b"x" * 100)[:50]])
async def test_a_client_that_goes_in_the_middle_of_a_frame_ends_its_requests(site, engine, bystander, data, end):
    async with connected(site) as client:
        await client.start("own")
        await client.receive()
        await client.stream.send_all(data)
        if end == "RST":
            reset(client.stream)
    assert await engine.wait_closed(1) == [(499, None)]
    await check_only_the_socket_is_harmed(site, bystander)


@pytest.mark.parametrize("data", [frame(1, b"{}"), b"\x81\x85" * 50, b"x"], ids=["a frame", "half frames", "a byte"])
async def test_data_before_the_handshake_is_answered_with_400_and_the_end(site, bystander, data):
    async with await site.connect() as stream:
        await stream.send_all(handshake() + data)
        assert (await read_all(stream)).startswith(b"HTTP/1.1 400 ")
    await check_only_the_socket_is_harmed(site, bystander)


async def test_data_after_the_close_is_ignored(site, bystander):
    async with connected(site) as client:
        goodbye = frame(8, (1000).to_bytes(2, "big"))
        await client.stream.send_all(goodbye + frame(1, b'{"type": "ping", "t": 1}') + goodbye + b"junk")
        assert await client.close_code() == 1000
    await check_only_the_socket_is_harmed(site, bystander)


@pytest.mark.parametrize("bad", [{"key": None}, {"key": "\x7f"}, {"key": "c2hvcnQ="}, {"Sec-WebSocket-Version": "7"}])
async def test_a_bad_handshake_is_answered_with_400_and_the_end(site, bystander, bad):
    data = handshake(key=bad.get("key", "dGhlIHNhbXBsZSBub25jZQ=="))
    if "Sec-WebSocket-Version" in bad:
        data = data.replace(b"Version: 13", b"Version: 7")
    async with await site.connect() as stream:
        await stream.send_all(data)
        assert (await read_all(stream)).startswith(b"HTTP/1.1 400 ")
    await check_only_the_socket_is_harmed(site, bystander)


async def test_compression_is_not_accepted(site, bystander):
    async with connected(site, Sec_WebSocket_Extensions="permessage-deflate; client_max_window_bits") as client:
        assert b"extensions" not in client.response.lower()
        await client.send("ping", t=1)
        assert await client.receive() == {"type": "pong", "t": 1}
    await check_only_the_socket_is_harmed(site, bystander)


async def serve_sockets(engine, nursery: trio.Nursery, ping_s: float) -> Site:
    """The sockets alone, with another ping interval."""
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    install()
    sock = listen("127.0.0.1", 0, write_timeout_s=5)
    site = Site(engine, sock.getsockname(), "http://x")
    config = hypercorn_config(sock, WriteLimit(5), Server())
    config.websocket_ping_interval = ping_s
    app = WebSockets(engine, lambda name: INFO)
    await nursery.start(partial(hypercorn_serve, app, config, shutdown_trigger=trio.sleep_forever))
    return site


async def test_a_client_that_answers_no_ping_is_given_up(engine, nursery):
    engine.hold_at = 1
    site = await serve_sockets(engine, nursery, ping_s=0.05)
    async with connected(site) as client:
        client.answers_pings = False
        await client.start("a")
        await client.receive()
        assert await client.close_code() == NO_ANSWER
    assert await engine.wait_closed(1) == [(499, None)]


async def test_a_client_that_answers_pings_may_be_silent(engine, nursery):
    engine.hold_at = 1
    site = await serve_sockets(engine, nursery, ping_s=0.05)
    async with connected(site) as client:
        await client.start("a")
        await client.receive()
        with trio.move_on_after(0.5) as waited:
            await client.receive()
        assert waited.cancelled_caught
        engine.release.set()
        assert (await client.answer("a"))[1]["type"] == "done"
