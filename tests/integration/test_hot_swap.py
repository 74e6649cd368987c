"""Hot swap under load: no request lost, none mixed; over HTTP, a new version of an installed plugin and a bad one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import trio
from click.testing import CliRunner
from msgspec import Struct

from headrace.core.engine import Engine
from headrace.hooks.decode import Use
from headrace.hooks.messages import TokenPrompt
from headrace.hooks.settings import Line, Model, Sampling, Settings
from headrace.server.cli import main
from tests.integration import strangers
from tests.integration.lines import gather, running
from tests.integration.processes import served

Install = Callable[[str, str], ModuleType]

NUM_STREAMS = 32
NUM_RELOADS = 20

DICE = '''
"""Logits processor `dice`: in place of the model's logits, a table that depends on this version and on the prompt."""

import torch
from msgspec import Struct

from headrace.hooks.registry import plugin

VERSION = {version}  # {padding}


class Params(Struct, forbid_unknown_fields=True):
    pass


class Dice:
    phase = "bias"

    def __init__(self, context, options):
        generator = torch.Generator().manual_seed(VERSION)
        self.table = torch.randn(101, context.sampling.vocab_size, generator=generator) * 3
        self.prompts = [0] * context.sampling.num_slots

    def admit(self, slot, params, admitted):
        self.prompts[slot] = sum(admitted.prompt_ids) + len(admitted.prompt_ids)
        return True

    def apply(self, logits, rows):
        places = [self.prompts[slot] + 7 * n for slot, n in zip(rows.slots, rows.num_outputs)]
        return self.table[torch.tensor(places) % len(self.table)].clone()


@plugin
def register_logits_processor(register):
    register("dice", Dice, params=Params)
'''


def dice(version: int) -> str:
    # A compiled file counts as fresh within the second if its source has kept its size.
    return DICE.format(version=version, padding="x" * version)


def write(folder: Path, version: int) -> None:
    """A new version of the plugin takes the place of the one that is installed."""
    (folder / "stranger_dice.py").write_text(dice(version), "utf-8")
    for info in folder.glob("stranger_dice-*.dist-info"):
        info.rename(folder / f"stranger_dice-1.{version}.dist-info")
    (info,) = folder.glob("stranger_dice-*.dist-info")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stranger-dice\nVersion: 1.{version}\n")


# ── in this process ───────────────────────────────────────────────────────────────────────────────────────────────


def settings_of(tiny: Path, index: int) -> Settings:
    """The configuration of the *index*-th stack: with each, something else is chosen besides the plugin's version."""
    extra = (Use(use="dice"), *([Use(use="typical", options={"p": 0.9})] if index % 3 == 1 else []))
    sampler = Use(use="mirostat") if index % 4 == 2 else Use(use="categorical")
    defaults: dict[str, Any] = {"top_k": 10 + index} if index % 2 else {}
    return Settings(
        model=Model(uri=str(tiny), threads=1),
        line=Line(
            kv_blocks=1024,
            max_prompt_tokens=100_000,
            max_running=16,
            policy=Use(use=("shortest", "fcfs", "priority")[index % 3]),
        ),
        sampling=Sampling(extra_processors=extra, sampler=sampler, defaults=defaults),
    )


class Answer(Struct, frozen=True):
    """What the *number*-th request came to, choice by choice, and the fingerprint it was told."""

    number: int
    fingerprint: str
    token_ids: tuple[tuple[int, ...], ...]


async def ask(engine: Engine, number: int) -> Answer:
    """Ask what depends on *number* alone. Short ones overtake long ones, and some have two choices."""
    prompt = TokenPrompt(token_ids=(*range(1, 2 + number % 7), number % 250))
    lengths = {"max_tokens": 6 + number * 5 % 13, "n": 2 if number % 5 == 0 else 1}
    request = engine.request(
        prompt, {"seed": number, "ignore_eos": True, "return_token_ids": True, **lengths}, patience_s=60
    )
    token_ids: list[tuple[int, ...]] = [()] * request.params.n
    try:
        await engine.submit(request)
        while (delta := await engine.receive(request)) is not None:
            if delta.error is not None:
                raise delta.error
            token_ids[delta.choice] += delta.token_ids
    finally:
        engine.close(request)
    assert {len(each) for each in token_ids} == {request.params.max_tokens}
    assert request.stack is not None
    return Answer(number, request.stack.fingerprint, tuple(token_ids))


class Load:
    """Streams that ask again and again, until they are told to stop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: list[Answer] = []
        self.num_asked = 0
        self.over = False
        self._more = trio.lowlevel.ParkingLot()

    async def stream(self) -> None:
        while not self.over:
            self.num_asked += 1
            self.answers.append(await ask(self.engine, self.num_asked))
            self._more.unpark_all()

    async def answered(self, count: int) -> None:
        """Wait until so many more have been answered."""
        goal = len(self.answers) + count
        while len(self.answers) < goal:
            await self._more.park()


async def test_32_streams_over_20_reloads_lose_nothing_and_each_is_its_own_stacks(
    tiny: Path, install: Install, tmp_path: Path
) -> None:
    install("dice", dice(0))
    fingerprints: list[str] = []
    async with running(Engine(settings_of(tiny, 0))) as engine:
        load = Load(engine)
        assert engine.info is not None
        fingerprints.append(engine.info.fingerprint)
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_STREAMS):
                nursery.start_soon(load.stream)
            for index in range(1, NUM_RELOADS + 1):
                await load.answered(4)
                write(tmp_path, index)
                report = await engine.reload(settings_of(tiny, index))
                assert report.plugins == (f"stranger-dice 1.{index - 1 or 0} → 1.{index}",)
                assert report.old == fingerprints[-1]
                fingerprints.append(report.new)
            await load.answered(4)
            load.over = True
        assert engine.num_live == 0
    assert len(set(fingerprints)) == NUM_RELOADS + 1
    # None was lost: each of those that were asked came to its end.
    assert len(load.answers) == load.num_asked
    by_stack = {each: [answer for answer in load.answers if answer.fingerprint == each] for each in fingerprints}
    assert sum(map(len, by_stack.values())) == len(load.answers)
    assert sum(bool(answers) for answers in by_stack.values()) > NUM_RELOADS // 2
    # None was mixed: each is what its stack alone gives.
    write(tmp_path, 0)
    del sys.modules["stranger_dice"]
    async with running(Engine(settings_of(tiny, 0))) as engine:
        for index, fingerprint in enumerate(fingerprints):
            if index:
                write(tmp_path, index)
                await engine.reload(settings_of(tiny, index))
            assert engine.info is not None
            assert engine.info.fingerprint == fingerprint
            expected = by_stack[fingerprint]
            alone = await gather([partial(ask, engine, of.number) for of in expected])
            assert alone == expected


async def test_a_reload_that_fails_gives_all_reasons_and_changes_nothing(
    tiny: Path, install: Install, tmp_path: Path
) -> None:
    install("dice", dice(0))
    async with running(Engine(settings_of(tiny, 0))) as engine:
        before = await ask(engine, 3)
        (tmp_path / "stranger_dice.py").write_text("raise RuntimeError('not today')", "utf-8")
        bad = Settings(
            model=Model(uri="elsewhere", threads=1, chat_template=Use(use="nobody")),
            line=settings_of(tiny, 0).line,
            sampling=Sampling(extra_processors=(Use(use="dice"),), stop_watchers=(Use(use="nothing"),)),
        )
        with pytest.raises(Exception, match="needs a restart") as caught:
            await engine.reload(bad)
        reasons = str(caught.value).splitlines()
        assert [reason.partition(":")[0] for reason in reasons[:2]] == ["model.uri", "model.chat_template.use"]
        assert any("RuntimeError: not today" in reason for reason in reasons)
        assert any("no stop called 'nothing'" in reason for reason in reasons)
        assert await ask(engine, 3) == before
        write(tmp_path, 4)
        report = await engine.reload()
        assert report.plugins == ("stranger-dice 1.0 → 1.4",)
        assert (await ask(engine, 3)).token_ids != before.token_ids


# ── over HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────

KEY = "the-operators-own-key"
CONFIG = """
[sampling]
extra_processors = ["dice"]
[server.auth]
use = "static-keys"
options.keys = [{ name = "ops", key = { env = "OPS_KEY" }, scopes = ["infer", "models", "metrics", "admin"] }]
"""


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_takes_a_new_version_while_it_streams_and_refuses_a_bad_configuration(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    strangers.install(site, "dice", dice(0))
    (tmp_path / "headrace.toml").write_text(CONFIG, "utf-8")
    monkeypatch.setenv("OPS_KEY", KEY)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    body = {"prompt": [1, 2, 3], "seed": 5, "ignore_eos": True, "max_tokens": 8, "return_token_ids": True}
    with served(tmp_path, str(tiny), path=site) as server:
        client = httpx.Client(base_url=server.url, headers={"x-api-key": KEY}, timeout=60, trust_env=False)
        with client:
            first = client.post("/v1/completions", json=body).json()
            old = first["system_fingerprint"]
            long = {**body, "max_tokens": 400, "stream": True}
            with client.stream("POST", "/v1/completions", json=long) as response:
                stream = events(response)
                seen = [next(stream)]
                write(site, 1)
                result = CliRunner().invoke(
                    main, ["plugins", "reload", "--url", server.url], env={"HEADRACE_API_KEY": KEY}
                )
                assert result.exit_code == 0, result.output
                second = client.post("/v1/completions", json=body).json()
                seen += stream
            new = second["system_fingerprint"]
            assert result.output.splitlines() == [
                f"fingerprint: {old} → {new}",
                "settings changed: none",
                "plugins imported anew: stranger-dice 1.0 → 1.1",
            ]
            assert old != new
            # The stream went on as it had begun.
            assert {event["system_fingerprint"] for event in seen} == {old}
            ids = [id for event in seen for choice in event["choices"] for id in choice["token_ids"]]
            assert len(ids) == 400
            assert ids[:8] == first["choices"][0]["token_ids"] != second["choices"][0]["token_ids"]
            (tmp_path / "headrace.toml").write_text("[server]\ndrain_s = 5\n" + CONFIG, "utf-8")
            result = CliRunner().invoke(main, ["plugins", "reload", "--url", server.url], env={"HEADRACE_API_KEY": KEY})
            assert result.exit_code == 1
            assert (
                "headrace.toml:2:1: server.drain_s: cannot be changed while it serves; it needs a restart"
                in result.output
            )
            (tmp_path / "headrace.toml").write_text(CONFIG.replace('"dice"', '"nobody"'), "utf-8")
            os.kill(server.child.pid, signal.SIGHUP)
            wait_for(lambda: any(event["event"].startswith("not reloaded") for event in server.events()))
            assert client.get("/version").json()["fingerprint"] == new
            (tmp_path / "headrace.toml").write_text(CONFIG + "[line]\npolicy = 'shortest'\n", "utf-8")
            os.kill(server.child.pid, signal.SIGHUP)
            wait_for(lambda: len([event for event in server.events() if event["event"] == "reloaded"]) == 2)
            assert client.get("/version").json()["fingerprint"] not in (old, new)
            assert client.post("/v1/completions", json=body).json()["choices"] == second["choices"]
