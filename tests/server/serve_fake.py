"""A server process in front of a fake engine: `python -m tests.server.serve_fake DRAIN_S` prints its URL."""

import sys
from functools import partial

import trio

from headrace.hooks.config import Server
from headrace.server import logs
from headrace.server.metrics import Metrics
from headrace.server.serve import listen, serve, url
from tests.server.fake_engine import FakeEngine


def main(drain_s: float) -> None:
    logs.configure("json", "info")
    engine = FakeEngine()
    engine.hold_at = 2
    engine.word = lambda token_id: f" w{token_id}" if token_id < 10 else "x" * 20_000
    server = Server(host="127.0.0.1", port=0, drain_s=drain_s, write_timeout_s=60)
    sock = listen(server.host, server.port, write_timeout_s=60)
    print(url(sock), flush=True)
    trio.run(partial(serve, engine, sock, server, metrics=Metrics()))


if __name__ == "__main__":
    main(float(sys.argv[1]))
