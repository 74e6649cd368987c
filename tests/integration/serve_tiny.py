"""A server process that can be looked into: `python -m tests.integration.serve_tiny MODEL` prints its URL.

On SIGUSR1 it prints what it holds, as one line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial

import psutil
import trio

from headrace.core.engine import Engine
from headrace.hooks.config import Server
from headrace.server import logs
from headrace.server.metrics import Metrics
from headrace.server.serve import listen, serve, url
from tests.integration.lines import settings


async def main(model: str) -> None:
    metrics = Metrics()
    engine = Engine(settings(model, kv_blocks=256, max_running=16), observers=[metrics])
    server = Server(host="127.0.0.1", port=0, drain_s=5)
    sock = listen(server.host, server.port, write_timeout_s=server.write_timeout_s)
    address = url(sock)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, engine, sock, server, metrics=metrics))
        await engine.ready.wait()
        print(address, flush=True)
        nursery.start_soon(report, engine)


async def report(engine: Engine) -> None:
    process = psutil.Process()
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        async for _ in signals:
            statistics = engine.statistics()
            held = {
                "live": engine.num_live,
                "running": statistics.running,
                "waiting": statistics.waiting,
                "parked": statistics.parked,
                "blocks": statistics.blocks_used,
                "slots": statistics.slots_used,
                "messages": sum(channel.depth for channel in statistics.channels),
                "tasks": trio.lowlevel.current_statistics().tasks_living,
                "files": process.num_fds(),
                "rss": process.memory_info().rss,
            }
            print(json.dumps(held), flush=True)


if __name__ == "__main__":
    logs.configure("json", "warning")
    trio.run(main, sys.argv[1])
