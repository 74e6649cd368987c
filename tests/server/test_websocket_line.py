"""Many sockets in front of a real line: whoever is slow or changes their mind, each request ends once and rightly."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import trio

from headrace.core.engine import Engine
from headrace.core.kv.blocks import BlockPool
from tests.fakes import FakeExecutor, NumberTokenizer, bound, counting, make_engine, make_parts
from tests.server.site import Site, running
from tests.server.ws_client import Client, connected

NUM_SOCKETS = 64
NUM_REQUESTS = 4
NUM_PROMPTS = 16
NUM_TOKENS = 32
WIDTH = 3000
"""Characters a token: enough that a slow socket's buffers fill."""


class WideTokenizer(NumberTokenizer):
    """Its tokens are long texts."""

    def decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        return "".join(f"{token_id}".ljust(WIDTH, ".") for token_id in token_ids)

    def decoder(self, *, skip_special: bool) -> WideDecoder:
        return WideDecoder()


class WideDecoder:
    def feed(self, token_id: int) -> str:
        return f"{token_id}".ljust(WIDTH, ".")

    def flush(self) -> str:
        return ""


def quick(pool: BlockPool) -> FakeExecutor:
    return FakeExecutor(pool, step_s=0.001, model=counting)


def wide_engine() -> Engine:
    parts = make_parts(
        num_blocks=8192,
        max_running=64,
        max_waiting=NUM_SOCKETS * NUM_REQUESTS,
        max_step_tokens=512,
        executor=quick,
    )
    stack = msgspec.structs.replace(parts.stack, tokenizer=bound("wide", WideTokenizer()))
    return make_engine(msgspec.structs.replace(parts, stack=stack), mailbox_deltas=4)


def body(prompt: int) -> dict[str, object]:
    return {"prompt": [prompt, prompt + 1, prompt + 2], "max_tokens": NUM_TOKENS, "seed": 1}


async def text_by_sse(site: Site, prompt: int) -> str:
    response = await site.client.post("/v1/completions", json={**body(prompt), "stream": True})
    events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@dataclass
class Answer:
    prompt: int
    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    endings: list[dict[str, object]] = field(default_factory=list)
    cancel_at: int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Crowd:
    """What the clients have seen."""

    def __init__(self, site: Site, engine: Engine) -> None:
        self.site = site
        self.engine = engine
        self.answers: list[Answer] = []
        self.most_parked = 0

    async def socket(self, index: int) -> None:
        """Ask for several answers and cancel some of them; every other client is slow."""
        chance = random.Random(index)
        slow = index % 2 == 0
        asked = {f"{index}-{place}": Answer(chance.randrange(NUM_PROMPTS)) for place in range(NUM_REQUESTS)}
        self.answers += asked.values()
        async with connected(self.site, 4096 if slow else None) as client:
            for id, answer in asked.items():
                answer.cancel_at = chance.choice([None, None, 0, chance.randrange(1, 10)])
                await client.send("start", id=id, kind="completion", request=body(answer.prompt))
                if answer.cancel_at == 0:
                    await client.send("cancel", id=id)
            while not all(answer.endings for answer in asked.values()):
                if slow:
                    await trio.sleep(0.01)
                await self._receive(client, asked)
            # Nothing may follow the endings.
            await client.send("ping", t=index)
            assert await client.receive() == {"type": "pong", "t": index}

    async def _receive(self, client: Client, asked: dict[str, Answer]) -> None:
        message = await client.receive()
        answer = asked[str(message["id"])]
        self.most_parked = max(self.most_parked, self.engine.statistics().parked)
        if message["type"] != "delta":
            answer.endings.append(message)
            return
        assert not answer.endings
        assert message["seq"] == len(answer.texts)
        answer.texts.append(str(message["text"]))
        answer.num_tokens += int(str(message["n"]))
        if answer.cancel_at is not None and len(answer.texts) == answer.cancel_at:
            await client.send("cancel", id=message["id"])


async def test_a_crowd_of_sockets_gets_what_server_sent_events_bring() -> None:
    engine = wide_engine()
    async with running(engine, write_timeout_s=60, drain_s=5) as site:  # type: ignore[arg-type]
        await engine.ready.wait()
        expected = [await text_by_sse(site, prompt) for prompt in range(NUM_PROMPTS)]
        crowd = Crowd(site, engine)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for index in range(NUM_SOCKETS):
                    nursery.start_soon(crowd.socket, index)
    assert len(crowd.answers) == NUM_SOCKETS * NUM_REQUESTS
    for answer in crowd.answers:
        (ending,) = answer.endings
        if ending["type"] == "done":
            assert answer.text == expected[answer.prompt]
            assert ending["usage"]["completion_tokens"] == answer.num_tokens == NUM_TOKENS  # type: ignore[index]
        else:
            assert answer.cancel_at is not None
            assert ending["code"] == "cancelled"
            assert expected[answer.prompt].startswith(answer.text)
    kinds = {str(answer.endings[0]["type"]) for answer in crowd.answers}
    assert kinds == {"done", "error"}
    assert crowd.most_parked > 0
    check_nothing_is_held(engine)


def check_nothing_is_held(engine: Engine) -> None:
    statistics = engine.statistics()
    assert engine.num_live == 0
    assert (statistics.running, statistics.waiting, statistics.parked) == (0, 0, 0)
    assert (statistics.blocks_used, statistics.slots_used) == (0, 0)
