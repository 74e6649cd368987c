"""Binding, loading, draining, dying: the life of the process."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from headrace.hooks.config import Server
from headrace.hooks.errors import EngineDied, StartError
from headrace.server.metrics import Metrics
from headrace.server.serve import listen, serve, url
from tests.server.fake_engine import FakeEngine
from tests.server.site import Site, running
from tests.server.wire import post, read_all, read_until

ROOT = Path(__file__).parents[2]


# ── binding ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_port_in_use_is_said_in_the_operators_words():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} of 127.0.0.1 is in use.*--port"):
            listen("127.0.0.1", port, write_timeout_s=1)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused(host):
    with pytest.raises(StartError, match=host):
        listen(host, 0, write_timeout_s=1)


def test_an_ipv6_address_has_brackets_in_its_url():
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with listen("::1", 0, write_timeout_s=1) as sock:
        assert url(sock).startswith("http://[::1]:")


# ── states ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def states(site: Site) -> tuple[int, int, int]:
    """Status of /health, of /ready, and of an ordinary request."""
    answers = [await site.client.get("/health"), await site.client.get("/ready"), await site.chat()]
    return tuple(answer.status_code for answer in answers)


async def test_a_ready_server_is_healthy_and_head_works(site):
    assert await states(site) == (200, 200, 200)
    answer = await site.client.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_while_loading_health_is_503_and_requests_may_come_back():
    engine = FakeEngine(state="loading")
    engine.loaded = trio.Event()
    async with running(engine) as site:
        assert await states(site) == (503, 503, 503)
        assert (await site.client.get("/health")).json() == {"status": "loading"}
        answer = await site.chat()
        assert int(answer.headers["retry-after"]) > 0
        assert "loading" in answer.json()["error"]["message"]
        assert (await site.client.get("/v1/models")).status_code == 503
        assert (await site.client.get("/metrics")).status_code == 200
        engine.loaded.set()
        await engine.ready.wait()
        assert await states(site) == (200, 200, 200)


async def test_while_draining_health_stays_and_new_requests_are_refused(site, engine, nursery):
    engine.hold_at = 1
    nursery.start_soon(partial(site.chat, stream=True))
    await engine.held.wait()
    nursery.start_soon(engine.drain, 10)
    await trio.testing.wait_all_tasks_blocked()
    assert await states(site) == (200, 503, 503)
    engine.release.set()
    assert await engine.wait_closed(1) == [(200, None)]


async def test_ready_is_called_once_the_model_is_loaded(engine, nursery):
    called = trio.Event()
    sock = listen("127.0.0.1", 0, write_timeout_s=1)
    await nursery.start(partial(serve, engine, sock, Server(port=0), metrics=Metrics(), ready=called.set))
    with trio.fail_after(5):
        await called.wait()
    await engine.drain(0)


async def test_what_a_loaded_server_has_is_looked_through_for_garbage_no_more(engine):
    sock = listen("127.0.0.1", 0, write_timeout_s=1)
    kept = [[i] for i in range(1000)]
    before = gc.get_freeze_count()
    async with trio.open_nursery() as nursery:
        called = trio.Event()
        await nursery.start(partial(serve, engine, sock, Server(port=0), metrics=Metrics(), ready=called.set))
        with trio.fail_after(5):
            await called.wait()
        assert gc.get_freeze_count() >= before + len(kept)
        assert not any(each is kept for each in gc.get_objects())
        await engine.drain(0)

    assert gc.get_freeze_count() == 0
    assert any(each is kept for each in gc.get_objects())


async def test_when_the_engine_dies_clients_are_told_and_the_server_ends_with_its_error(engine):
    engine.hold_at = 1
    sock = listen("127.0.0.1", 0, write_timeout_s=1)
    site = Site(engine, sock.getsockname(), url(sock))

    async def client():
        await engine.ready.wait()
        async with await site.connect() as stream:
            await stream.send_all(post(stream=True))
            await read_until(stream, b" w1")
            engine.die("a stage failed")
            rest = await read_all(stream)
        assert b"a stage failed" in rest
        assert b"[DONE]" not in rest

    async with site.client, trio.open_nursery() as nursery:
        nursery.start_soon(client)
        with trio.fail_after(5), pytest.raises(EngineDied, match="a stage failed"):
            await serve(engine, sock, Server(port=0), metrics=Metrics())


async def test_an_engine_that_cannot_start_ends_the_server_with_its_error():
    class Broken(FakeEngine):
        async def run(self, *, progress=None):
            raise StartError("no such checkpoint")

    sock = listen("127.0.0.1", 0, write_timeout_s=1)
    with trio.fail_after(5), pytest.raises(StartError, match="no such checkpoint"):
        await serve(Broken(), sock, Server(port=0), metrics=Metrics())


async def test_a_signal_while_loading_ends_the_server():
    engine = FakeEngine(state="loading")
    engine.loaded = trio.Event()
    sock = listen("127.0.0.1", 0, write_timeout_s=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, engine, sock, Server(port=0), metrics=Metrics()))
        with trio.fail_after(5):
            await trio.testing.wait_all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGTERM)


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def process(drain_s: float, *words: str):
    """A server process, and the URL it listens on."""
    command = [sys.executable, "-m", "tests.server.serve_fake", str(drain_s), *words]
    child = await trio.lowlevel.open_process(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        address = (await read_until(child.stdout, b"\n")).decode().strip()
        yield child, address
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        await child.stdout.aclose()
        await child.stderr.aclose()


async def open_stream(address: str, **fields: object) -> trio.SocketStream:
    host, port = address.removeprefix("http://").split(":")
    stream = await trio.open_tcp_stream(host, int(port))
    await stream.send_all(post(stream=True, **fields))
    await read_until(stream, b" w2")
    return stream


async def test_sigterm_ends_an_open_stream_with_an_error_event_and_the_process_with_0_in_time():
    async with process(0.5) as (child, address), httpx.AsyncClient(trust_env=False) as idle:
        await idle.get(f"{address}/health")  # Leaves an idle connection.
        async with await open_stream(address) as stream:
            started = trio.current_time()
            child.send_signal(signal.SIGTERM)
            rest = await read_all(stream)
            await child.wait()
            took = trio.current_time() - started
    assert b'{"error":' in rest
    assert b"[DONE]" not in rest
    assert child.returncode == 0
    assert 0.5 <= took < 0.5 + 1


async def test_sigterm_under_load_ends_in_time_and_tells_every_client_that_reads():
    finished, cut, unread, rests = 8, 6, 2, []

    async def read_rest(stream: trio.SocketStream) -> None:
        rests.append(await read_all(stream))

    async with process(1.0, "on") as (child, address), AsyncExitStack() as stack:

        async def client(**fields: object) -> trio.SocketStream:
            return await stack.enter_async_context(await open_stream(address, **fields))

        readers = [await client(max_tokens=8) for _ in range(finished)]
        readers += [await client(ignore_eos=True) for _ in range(cut)]
        idlers = [await client(max_tokens=120) for _ in range(unread)]
        started = trio.current_time()
        child.send_signal(signal.SIGTERM)
        async with trio.open_nursery() as nursery:
            for stream in readers:
                nursery.start_soon(read_rest, stream)
            nursery.start_soon(child.wait)
        took = trio.current_time() - started
        report = await read_until(child.stderr, b'"drained"')
        left = [await read_all(stream) for stream in idlers]
    assert child.returncode == 0
    assert 1.0 <= took < 1.0 + 1.5
    assert sorted(b"[DONE]" in rest for rest in rests) == [False] * cut + [True] * finished
    assert all(b'{"error":' in rest for rest in rests if b"[DONE]" not in rest)
    assert not any(b"[DONE]" in rest for rest in left)
    drained = next(line for line in map(json.loads, report.splitlines()) if line["event"] == "drained")
    assert (drained["finished"], drained["cut"]) == (finished, cut + unread)


async def test_a_second_signal_cuts_at_once():
    async with process(60) as (child, address), await open_stream(address) as stream:
        child.send_signal(signal.SIGTERM)
        await read_until(child.stderr, b"draining")
        child.send_signal(signal.SIGINT)
        with trio.fail_after(5):
            assert b'{"error":' in await read_all(stream)
            await child.wait()
    assert child.returncode == 0


async def test_sigterm_without_requests_ends_the_process_at_once():
    async with process(60) as (child, address), httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"{address}/health")
        child.send_signal(signal.SIGTERM)
        with trio.fail_after(5):
            await child.wait()
    assert child.returncode == 0


def test_a_process_that_does_not_end_by_itself_is_ended():
    program = "import time; from headrace.server.serve import Watchdog; Watchdog().start(0.05); time.sleep(60)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert "still not stopped after 0.05 s" in result.stderr


def test_a_process_that_ends_in_time_is_left_alone():
    program = (
        "import time; from headrace.server.serve import Watchdog\n"
        "with Watchdog() as watchdog: watchdog.start(0.05)\n"
        "time.sleep(0.2)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
