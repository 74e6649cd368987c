"""A server process in front of a fake engine: `python -m tests.server.serve_fake DRAIN_S [on]` prints its URL.

Each answer waits at its third word: for ever, or with `on` until the server drains, unless it ignores its end.
"""

import sys
from functools import partial

import trio

from headrace.hooks.config import Server
from headrace.server import logs
from headrace.server.metrics import Metrics
from headrace.server.serve import listen, serve, url
from tests.server.fake_engine import FakeEngine


class GoesOn(FakeEngine):
    async def drain(self, budget_s):
        self.release.set()
        return await super().drain(budget_s)

    async def _generate(self, request):
        if request.params.ignore_eos:
            for index in (1, 2):
                self.put(request, 0, index, last=False, usage=None)
            await trio.sleep_forever()
        await super()._generate(request)


def main(drain_s: float, *, goes_on: bool) -> None:
    logs.configure("json", "info")
    engine = GoesOn() if goes_on else FakeEngine()
    engine.hold_at = 2
    engine.word = lambda token_id: f" w{token_id}" if token_id < 10 else "x" * 20_000
    server = Server(host="127.0.0.1", port=0, drain_s=drain_s, write_timeout_s=60)
    sock = listen(server.host, server.port, write_timeout_s=60)
    print(url(sock), flush=True)
    trio.run(partial(serve, engine, sock, server, metrics=Metrics()))


if __name__ == "__main__":
    main(float(sys.argv[1]), goes_on="on" in sys.argv[2:])
