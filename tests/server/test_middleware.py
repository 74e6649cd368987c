"""What every request passes: ids, and origins of web pages."""

import httpx
import pytest

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
