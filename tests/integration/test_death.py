"""A stage that must not fail fails: nobody hangs, everybody is told, and the process says so with its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import trio

from headrace.core.engine import Engine
from headrace.core.kv.blocks import BlockPool
from headrace.hooks.config import Server
from headrace.hooks.errors import EngineDied, Unavailable
from headrace.hooks.messages import Step, StepResult
from headrace.hooks.protocols import Executor
from headrace.server.app import create_app
from headrace.server.metrics import Metrics
from headrace.server.serve import listen, serve
from tests.fakes import FakeExecutor, ask, make_engine, make_parts
from tests.integration import strangers
from tests.integration.lines import death_of, gather, settings
from tests.integration.processes import served
from tests.server.site import running
from tests.server.wire import post, read_all, read_until

FAIL_AT = 10
NUM_STREAMS = 3


Install = Callable[[str, str], ModuleType]


class FailingHandle:
    async def result(self) -> StepResult:
        await trio.lowlevel.checkpoint()
        raise RuntimeError(f"step {FAIL_AT} failed on purpose")


class FailingResults(FakeExecutor):
    """Takes every step, and fails when `sample` asks for the result of one."""

    def submit(self, step: Step):  # type: ignore[no-untyped-def]
        handle = super().submit(step)
        return FailingHandle() if step.index == FAIL_AT else handle


def failing_forward(pool: BlockPool) -> Executor:
    return FakeExecutor(pool, fail_at=FAIL_AT)


def question(content: str = "1 2 3") -> bytes:
    messages = [{"role": "user", "content": content}]
    return post(extra="Connection: close\r\n", messages=messages, max_tokens=100, stream=True)


async def whole_stream(address: tuple[str, int], request: bytes) -> bytes:
    stream = await trio.open_tcp_stream(*address)
    async with stream:
        await stream.send_all(request)
        with trio.fail_after(60):
            return b"".join([part async for part in stream])


def check_told(answer: bytes, reason: bytes) -> None:
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"content":' in answer
    *_, last = (line for line in answer.splitlines() if line.startswith(b"data: "))
    assert reason in json.loads(last.removeprefix(b"data: "))["error"]["message"].encode()
    assert b"[DONE]" not in answer


@pytest.mark.parametrize("executor", [failing_forward, FailingResults], ids=["forward", "sample"])
async def test_a_stage_that_fails_ends_open_streams_with_an_error_event_and_the_server_with_its_reason(
    executor: Callable[[BlockPool], Executor],
) -> None:
    engine = make_engine(make_parts(executor=executor))
    sock = listen("127.0.0.1", 0, write_timeout_s=5)
    address = sock.getsockname()

    async def clients() -> list[bytes]:
        await engine.ready.wait()
        return await gather([partial(whole_stream, address, question(str(index))) for index in range(NUM_STREAMS)])

    async def server() -> None:
        with pytest.raises(EngineDied, match=f"step {FAIL_AT} failed on purpose"):
            await serve(engine, sock, Server(port=0), metrics=Metrics())

    with trio.fail_after(20):
        answers, _ = await gather([clients, server])
    for answer in answers:
        check_told(answer, b"step 10 failed on purpose")


async def test_a_dead_engine_is_unhealthy_and_answers_requests_with_503_at_once() -> None:
    engine = make_engine(make_parts(executor=failing_forward))

    async def question() -> None:
        await engine.ready.wait()
        with pytest.raises(Unavailable, match="failed on purpose"):
            await ask(engine, range(5), {"max_tokens": 50})

    await gather([partial(death_of, engine), question])
    app = create_app(engine, Metrics(), max_body_bytes=100_000, ping_s=15)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        with trio.fail_after(5):
            health, ready = await client.get("/health"), await client.get("/ready")
            chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "1"}]})
    assert (health.status_code, ready.status_code, chat.status_code) == (503, 503, 503)
    assert health.json() == {"status": "dead"}
    assert "died" in chat.json()["error"]["message"]


async def test_while_a_model_loads_the_server_says_so_and_then_answers(tiny: Path, install: Install) -> None:
    gate = install("gate", strangers.GATE).gate
    async with running(Engine(settings(f"gate:{tiny}"))) as site:
        loading = [await site.client.get("/health"), await site.client.get("/ready"), await site.chat()]
        gate.set()
        with trio.fail_after(30):
            await site.engine.ready.wait()
        ready = [await site.client.get("/health"), await site.client.get("/ready"), await site.chat()]
    assert [answer.status_code for answer in loading] == [503, 503, 503]
    assert loading[0].json() == {"status": "loading"}
    assert [answer.status_code for answer in ready] == [200, 200, 200]


async def test_the_process_of_a_line_that_failed_tells_its_clients_and_exits_with_1(tiny: Path, tmp_path: Path) -> None:
    strangers.install(tmp_path, "clumsy", strangers.CLUMSY)
    with served(tmp_path, str(tiny), "--set", "model.attention.use=clumsy", path=tmp_path) as server:
        host, port = server.url.removeprefix("http://").split(":")
        request = post(messages=[{"role": "user", "content": "on and on"}], stream=True, ignore_eos=True)
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(request)
            answer = await read_until(stream, b'"content":')
            async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
                refused = await client.post(f"{server.url}/v1/completions", json={"prompt": "trip"})
            answer += await read_all(stream)
        assert server.child.wait(20) == 1
        last = server.log.read_text("utf-8").splitlines()[-1]
    check_told(answer, b"tripped on purpose")
    assert refused.status_code == 503
    assert "tripped on purpose" in refused.json()["error"]["message"]
    assert last.startswith("headrace: ")
    assert "tripped on purpose" in last
