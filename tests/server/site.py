"""A live server on a free port, in front of a fake engine, in the test's own event loop."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import trio

from headrace.hooks.config import Server
from headrace.hooks.registry import Bound
from headrace.server.metrics import Metrics
from headrace.server.reload import Reload
from headrace.server.serve import listen, serve, url
from tests.server.fake_engine import FakeEngine


class Site:
    """A running server."""

    def __init__(self, engine: FakeEngine, address: tuple[str, int], url: str) -> None:
        self.engine = engine
        self.address = address
        self.url = url
        self.client = httpx.AsyncClient(base_url=url, timeout=15, trust_env=False)

    async def chat(self, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 3, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def connect(self, receive_buffer: int | None = None) -> trio.SocketStream:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await sock.connect(self.address)
        return trio.SocketStream(sock)

    async def works(self) -> bool:
        """Whether an ordinary request on a new connection succeeds."""
        async with httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=False) as client:
            body = {"messages": [{"role": "user", "content": "still there?"}], "max_tokens": 1}
            return (await client.post("/v1/chat/completions", json=body)).status_code == 200


@asynccontextmanager
async def running(
    engine: FakeEngine, *, auth: Bound | None = None, reload: Reload | None = None, **settings: object
) -> AsyncIterator[Site]:
    """Serve *engine* on a free port; in the end, drain it as a signal would, without the signal."""
    server = Server(host="127.0.0.1", port=0, **{"drain_s": 1.0, "write_timeout_s": 1.0, **settings})
    sock = listen(server.host, server.port, write_timeout_s=server.write_timeout_s)
    site = Site(engine, sock.getsockname(), url(sock))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, engine, sock, server, metrics=Metrics(), auth=auth, reload=reload))
        async with site.client:
            yield site
            if engine.state != "dead":
                await engine.drain(server.drain_s)
