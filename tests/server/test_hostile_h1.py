"""Hostile HTTP/1.1 and WebSocket inputs. After each, an ordinary request succeeds."""

import pytest
import trio
import trio.testing
from hypercorn.trio import serve as hypercorn_serve

from headrace.server.hardening import WriteLimit, install
from headrace.server.serve import hypercorn_config, listen
from tests.server.wire import post, read_all, reset

WEBSOCKET = (
    "GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: {version}\r\n{key}\r\n"
)
KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
H2C = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n{settings}\r\n"

HOSTILE = {
    "garbage": b"\x00\xff\xfe garbage \r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "a bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a huge header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    "a path with a byte over 127": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path with an escaped byte over 127": b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "PRI and junk": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"junk" * 100,
    "PRI alone": b"PRI * HTTP/2.0\r\n\r\n",
    "a pipelined request": post(stream=True) * 3,
    "stray line ends": post(stream=True) + b"\r\n\r\n",
    "h2c without settings": H2C.format(settings="").encode(),
    "h2c with bad settings": H2C.format(settings="HTTP2-Settings: !!!not base64!!!\r\n").encode(),
    "h2c with odd settings": H2C.format(settings="HTTP2-Settings: AAAA\r\n").encode(),
    "h2c with settings": H2C.format(settings="HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n").encode() + b"junk",
    "a WebSocket without a key": WEBSOCKET.format(version=13, key="").encode(),
    "a WebSocket with a bad key": WEBSOCKET.format(version=13, key="Sec-WebSocket-Key: \x7f\r\n").encode(),
    "a WebSocket of another version": WEBSOCKET.format(version=7, key=KEY).encode(),
    "a WebSocket where there is none": WEBSOCKET.format(version=13, key=KEY).encode(),
    "a WebSocket with a byte too many": WEBSOCKET.format(version=13, key=KEY).encode() + b"x",
    "a WebSocket with frames before its answer": WEBSOCKET.format(version=13, key=KEY).encode() + b"\x81\x85" * 50,
    "a WebSocket with a path over 127": WEBSOCKET.format(version=13, key=KEY).encode().replace(b"/v1", b"/\xff"),
}


@pytest.mark.parametrize("end", ["read", "reset"])
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
async def test_the_server_survives(site, data, end):
    stream = await site.connect()
    try:
        await stream.send_all(data)
        await stream.send_eof()
        if end == "read":
            await read_all(stream)
    except trio.BrokenResourceError:
        pass  # The server was quicker.
    reset(stream)
    assert await site.works()


async def test_the_server_survives_a_thousand_connections_that_are_reset_at_once(site):
    for _ in range(1000):
        reset(await site.connect())
    assert await site.works()


async def test_an_application_that_fails_inside_a_body_ends_its_connection(nursery):
    async def app(scope, receive, send):
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("broken")

    stream = await connect_to(app, nursery)
    await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    data = await read_all(stream)
    assert b"half" in data
    assert not data.endswith(b"0\r\n\r\n")
    await stream.aclose()


async def test_an_application_that_reads_no_more_does_not_hold_its_connection(nursery):
    async def app(scope, receive, send):
        assert scope["type"] == "http"
        await trio.testing.wait_all_tasks_blocked(0.01)  # By now its queue is full.
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    stream = await connect_to(app, nursery)
    await stream.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
    with trio.move_on_after(5) as scope:
        try:
            for _ in range(100):
                await stream.send_all(b"x" * 100_000)
        except trio.BrokenResourceError:
            pass
        await read_all(stream)
    assert not scope.cancelled_caught
    await stream.aclose()


async def connect_to(app, nursery):
    """Serve a bare application with the hardened server."""
    install()
    sock = listen("127.0.0.1", 0, write_timeout_s=1)
    address = sock.getsockname()
    await nursery.start(hypercorn_serve_with(app, hypercorn_config(sock, WriteLimit(1.0))))
    return await trio.open_tcp_stream(*address)


def hypercorn_serve_with(app, config):
    async def serve(task_status):
        await hypercorn_serve(app, config, shutdown_trigger=trio.sleep_forever, task_status=task_status)

    return serve
