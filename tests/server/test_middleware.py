"""What every request passes: ids, and origins of web pages."""

import httpx
import pytest
import trio

from headrace.server.app import create_app
from headrace.server.metrics import Metrics

ORIGIN = "http://localhost:5173"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_every_answer_has_an_id_of_its_own(client):
    answers = [await client.get("/health"), await client.get("/nowhere"), await client.post("/v1/completions")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3


async def test_a_clients_own_id_comes_back_and_names_the_request(client, engine):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "trace-7:a.b"})
    assert answer.headers["x-request-id"] == "trace-7:a.b"
    assert [request.id for request in engine.requests] == ["chatcmpl-trace-7:a.b"]


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", 'a"b', "id\u00e9"])
async def test_an_id_that_is_not_short_and_plain_is_replaced(client, name):
    answer = await client.get("/health", headers={"x-request-id": name.encode("utf-8")})
    assert len(answer.headers["x-request-id"]) == 24


async def test_requests_under_way_at_once_have_different_ids(site, engine):
    engine.hold_at = 1
    answers = []

    async def ask() -> None:
        site.client.headers["x-request-id"] = "same"
        answers.append(await site.chat())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        while len(engine.requests) < 2:
            await trio.lowlevel.checkpoint()
        engine.release.set()
    names = sorted(answer.headers["x-request-id"] for answer in answers)
    assert names[0] == "same"
    assert names[1].startswith("same-")


@pytest.fixture
async def web_client(engine, nursery):
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    app = create_app(engine, Metrics(), max_body_bytes=1000, ping_s=15, cors_origins=[ORIGIN])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def test_a_preflight_of_an_allowed_page_needs_no_key(web_client):
    answer = await web_client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_to_an_allowed_page_say_so(web_client, stream):
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    answer = await web_client.post("/v1/chat/completions", json=body, headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


async def test_other_pages_are_not_allowed(web_client):
    answer = await web_client.options("/v1/chat/completions", headers={**PREFLIGHT, "origin": "http://evil"})
    assert "access-control-allow-origin" not in answer.headers


async def test_without_origins_no_page_is_allowed(client):
    answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 405
