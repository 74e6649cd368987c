from collections.abc import AsyncIterator

import httpx
import pytest
import trio

from headrace.server import logs
from headrace.server.app import create_app
from headrace.server.metrics import Metrics
from tests.server.fake_engine import FakeEngine
from tests.server.site import Site, running


@pytest.fixture(autouse=True)
def quiet_logs() -> None:
    logs.configure("json", "warning")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine, nursery: trio.Nursery) -> AsyncIterator[httpx.AsyncClient]:
    """The application alone, without sockets: it answers whole bodies only."""
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    app = create_app(engine, Metrics(), max_body_bytes=100_000, ping_s=15, body_timeout_s=5)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def site(engine: FakeEngine) -> AsyncIterator[Site]:
    async with running(engine) as site:
        yield site
