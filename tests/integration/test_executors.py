"""A stranger's executor, chosen as any other component is: what it is given, what it cannot break, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result
from structlog.typing import EventDict

from headrace.core.build import build
from headrace.core.engine import Engine, measure_steps, quiet
from headrace.core.opened import open_model
from headrace.hooks.config import load
from headrace.hooks.decode import Use
from headrace.hooks.errors import ConfigError, MemoryPlanError, PluginError, StartError, Unavailable
from headrace.hooks.settings import Line, Model, Settings
from headrace.server.cli import main
from tests.integration import strangers
from tests.integration.lines import Asked, ask, death_of, gather, running

PROMPT = [7, 3, 9, 9, 4, 12, 250, 1, 8, 30, 77, 5, 6, 2]
WHO = r"executor echo of plugin echo \(stranger-echo 1.0\)"


@pytest.fixture
def echo(install: Callable[[str, str], ModuleType]) -> ModuleType:
    """The stranger's plugin, installed."""
    return install("echo", strangers.ECHO)


def settings(tiny: Path, use: str = "echo", *, model: dict[str, Any] | None = None, **rest: Any) -> Settings:
    options = {name: rest.pop(name) for name in ("mode", "num_blocks") if name in rest}
    line = Line(executor=Use(use=use, options=options), **{"kv_blocks": 256, **rest})
    return Settings(model=Model(uri=str(tiny), **(model or {})), line=line)


def greedy(num_tokens: int, **params: object) -> Asked:
    return Asked(PROMPT, {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, **params})


def headrace(*arguments: str, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(main, arguments)


# ── chosen ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_that_the_file_names_runs_the_line(echo: ModuleType, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(f"[model]\nuri = '{tiny}'\n[line]\nmax_running = 2\nkv_blocks = 99\nexecutor = 'echo'\n")
    loaded = load(file=file)
    async with running(Engine(loaded.settings, where=loaded.where)) as engine:
        answers = await gather([partial(ask, engine, greedy(20)) for _ in range(3)])
        assert [answer.token_ids for answer in answers] == [tuple((PROMPT * 2)[:20])] * 3
        assert (
            "echo of plugin echo (stranger-echo 1.0): weights, KV cache and their memory are its own" in engine.report
        )
        assert engine.statistics().blocks_total == 99
    (context,) = echo.contexts
    given = context.executor
    assert (given.num_slots, given.max_running, given.max_step_tokens) == (2 + 256, 2, 512)
    assert (given.max_model_len, given.block_size, given.num_blocks) == (512, 16, 99)
    assert context.checkpoint.artifact.path == tiny
    assert len(echo.ended) == 1


async def test_its_tokens_are_drawn_as_a_request_asks(echo: ModuleType, tiny: Path) -> None:
    async with running(Engine(settings(tiny))) as engine:
        biased = await ask(engine, greedy(3, logit_bias={PROMPT[1]: -100.0, 65: 80.0}))
        assert biased.token_ids == (65, 65, 65)
        assert [len(each.top_ids) for each in biased.logprobs] == [2, 2, 2]
        assert biased.logprobs[0].top_ids[0] == PROMPT[0]


@pytest.mark.parametrize(("use", "reads"), [("echo", False), ("thread", True), ("around", True)])
def test_weights_are_read_for_those_that_run_the_model_alone(
    use: str, reads: bool, echo: ModuleType, tiny: Path
) -> None:
    read: list[tuple[str, int, int]] = []
    parts = build(settings(tiny, use), lambda *progress: read.append(progress))
    assert bool(read) == reads
    assert ("weights  " in parts.report) == ("kernels  " in parts.report) == reads
    assert (f"{use} of plugin echo" in parts.report) == (use != "thread")


async def test_a_stranger_may_run_the_model_and_answers_as_the_built_in(echo: ModuleType, tiny: Path) -> None:
    answers = []
    for use in ("thread", "around"):
        async with running(Engine(settings(tiny, use, model={"threads": 1, "kernels": "reference"}))) as engine:
            answers.append(await ask(engine, greedy(12)))
    assert answers[0].token_ids == answers[1].token_ids


def test_a_flag_chooses_it_and_the_plan_claims_no_memory_that_is_not_headrace_s(echo: ModuleType, tiny: Path) -> None:
    shown = headrace("plan", str(tiny), "--executor", "echo")
    assert shown.exit_code == 0, shown.output
    _, *rows = shown.output.splitlines()
    assert [row.split("  ")[0] for row in rows] == ["executor", "KV cache", "room for"]
    assert rows[0].endswith("echo of plugin echo (stranger-echo 1.0): weights, KV cache and their memory are its own")
    assert rows[2].endswith("at most 32,768 tokens, 64 sequences of 512 tokens")
    assert echo.contexts == []


def test_a_variable_chooses_it(echo: ModuleType, tiny: Path) -> None:
    loaded = load(environ={"HEADRACE__LINE__EXECUTOR": "echo", "HEADRACE__MODEL__URI": str(tiny)})
    assert open_model(loaded.settings, quiet).executor.plugin.origin == "stranger-echo 1.0"


def test_the_one_that_holds_fewer_blocks_is_asked_for_no_more(echo: ModuleType, tiny: Path) -> None:
    parts = build(settings(tiny, num_blocks=40, kv_blocks=None), quiet)
    assert parts.pool.num_blocks == 40
    assert "40 blocks of 16 tokens" in parts.report
    assert "at most" not in parts.report


def test_blocks_that_it_does_not_hold_are_refused(echo: ModuleType, tiny: Path) -> None:
    with pytest.raises(MemoryPlanError, match="kv_blocks must be at most 40, what the executor holds, and is 256"):
        build(settings(tiny, num_blocks=40), quiet)
    with pytest.raises(MemoryPlanError, match="takes 32 blocks, and has 8; set max_model_len to at most 128"):
        build(settings(tiny, num_blocks=8, kv_blocks=None), quiet)
    with pytest.raises(PluginError, match="must have a whole number above 0 as num_blocks, or none, found 0"):
        build(settings(tiny, num_blocks=0), quiet)


# ── refused ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_that_is_not_there_is_shown_with_its_place_and_the_nearest(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[line]\nexecutor = 'tread'\n")
    loaded = load(file=file, flags={"model.uri": str(tiny)})
    with pytest.raises(ConfigError, match=r"headrace.toml:2:1: line.executor.*'tread'; did you mean thread\?"):
        build(loaded.settings, quiet, loaded.where)


MEANINGLESS = {
    "model.quantizer": "'none'",
    "model.attention": "'sdpa'",
    "model.kernels": "'reference'",
    "model.threads": "1",
    "line.kv_memory": "'1GiB'",
    "line.memory_headroom": "0.1",
}


@pytest.mark.parametrize("key", MEANINGLESS)
def test_settings_of_the_model_are_refused_where_it_does_not_run(
    key: str, echo: ModuleType, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(f"line.executor = 'echo'\n{key} = {MEANINGLESS[key]}\n")
    loaded = load(file=file, flags={"model.uri": str(tiny)})
    reason = f"{key}: means nothing to the executor echo of plugin echo .*leave it out"
    with pytest.raises(ConfigError, match=rf"headrace.toml:2:1: {reason}"):
        build(loaded.settings, quiet, loaded.where)
    checked = headrace("config", "check", "--config", str(file))
    assert checked.exit_code == 2
    assert f"{file}:2:1: {key}: means nothing" in checked.output


def test_all_of_them_are_told_at_once_and_the_defaults_are_none(echo: ModuleType, tiny: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(settings(tiny, model={"threads": 1, "kernels": "reference"}), quiet)
    assert len(str(caught.value).splitlines()) == 2
    build(settings(tiny, model={"kernels": "auto", "quantizer": Use(use="auto")}), quiet)


def test_steps_of_a_model_that_does_not_run_are_not_measured(echo: ModuleType, tiny: Path) -> None:
    steps = measure_steps(settings(tiny), quiet, batches=(1,), prompts=(), context=1, rounds=1)
    with pytest.raises(ConfigError, match=f"the {WHO} does not run Headrace's own model, which is needed here"):
        next(steps)


async def test_a_reload_does_not_change_it(echo: ModuleType, tiny: Path) -> None:
    async with running(Engine(settings(tiny))) as engine:
        for other in (settings(tiny, "thread"), settings(tiny, mode="else")):
            with pytest.raises(ConfigError, match=r"line\.executor: cannot be changed while it serves"):
                await engine.reload(other)
        await engine.reload()
        assert (await ask(engine, greedy(4))).token_ids == tuple(PROMPT[:4])


# ── broken ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("use", "options", "reason"),
    [
        ("echo", {"mode": "build"}, "executor echo could not be built: RuntimeError: broken on purpose"),
        ("lost", {}, "executor lost could not be built: ModuleNotFoundError: .*nowhere_at_all"),
        ("lazy", {}, "executor lazy says uses_model = True and must call Context.executor.load, and has not"),
        ("twice", {}, "executor twice must call Context.executor.load once"),
        ("thief", {}, "executor thief calls Context.executor.load, so its factory must say uses_model = True"),
    ],
)
def test_one_that_cannot_be_built_stops_the_start(
    use: str, options: dict[str, Any], reason: str, echo: ModuleType, tiny: Path
) -> None:
    with pytest.raises(StartError, match=rf"^plugin echo \(stranger-echo 1.0\): {reason}"):
        build(settings(tiny, use, **options), quiet)


async def test_one_that_cannot_be_started_stops_the_start(echo: ModuleType, tiny: Path) -> None:
    reason = r"^plugin echo \(stranger-echo 1.0\): executor echo could not be started: RuntimeError: broken on purpose"
    engine = Engine(settings(tiny, mode="enter"))
    with pytest.raises(PluginError, match=reason):
        await engine.run()
    assert engine.state == "dead"


async def test_one_that_fails_to_end_is_logged(echo: ModuleType, tiny: Path, logs: list[EventDict]) -> None:
    async with running(Engine(settings(tiny, mode="exit"))) as engine:
        await ask(engine, greedy(2))
    assert [entry["event"] for entry in logs] == ["an executor failed to end"]


BROKEN = {
    "submit": "failed in submit: RuntimeError: broken on purpose",
    "handle": r"failed in submit: TypeError: submit must return a handle with result\(\), found NoneType",
    "result": "failed in result: RuntimeError: broken on purpose",
    "words": "failed in result: TypeError: it must come to a StepResult, found str",
    "few": "failed in result: ValueError: 1 samples and 0 scores must come back, found 0 and 0",
    "large": r"failed in result: ValueError: token ids must be whole numbers below \d+, found 1000000",
    "neither": "failed in result: ValueError: sample 0 must have a token or an error, found neither",
    "hang": r"has kept the line for \d.\d s, longer than 0.5 s",
}


@pytest.mark.parametrize("mode", BROKEN)
async def test_one_that_breaks_while_serving_ends_the_line_by_name(mode: str, echo: ModuleType, tiny: Path) -> None:
    engine = Engine(settings(tiny, mode=mode, watchdog_s=0.05, plugin_stall_s=0.05))
    reason = f"{WHO} {BROKEN[mode]}"

    async def question() -> None:
        await engine.ready.wait()
        with pytest.raises(Unavailable, match=reason):
            await ask(engine, greedy(50))

    with trio.fail_after(30):
        death, _ = await gather([partial(death_of, engine), question])
    assert str(death).startswith("executor echo of plugin echo (stranger-echo 1.0) ")
    assert len(echo.ended) == 1
