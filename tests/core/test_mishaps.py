"""What went wrong once: at the door, at the end, between guesses and forks, and in other people's code."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import msgspec
import pytest
import structlog.testing
import trio
from trio.testing import MockClock

from headrace.core.engine import Engine, Parts
from headrace.core.local import run
from headrace.core.mailbox import Mailbox
from headrace.hooks.errors import BadRequest, EngineDied, RequestError, RequestFailed, TimedOut, Unavailable
from headrace.hooks.messages import Delta, Request, Step, StepResult, TextPrompt, TokenPrompt
from headrace.hooks.settings import Settings
from tests.fakes import VOCAB_SIZE, FakeExecutor, answer, ask, humming, make_engine, make_parts, text_of

T = TypeVar("T")


@asynccontextmanager
async def line(parts: Parts, *, mailbox_deltas: int = 1000) -> AsyncIterator[Engine]:
    engine = make_engine(parts, mailbox_deltas=mailbox_deltas)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await engine.ready.wait()
        yield engine
        await engine.drain(1000)
    assert engine.statistics().slots_used == 0


def one_place(step_s: float = 0.01) -> Parts:
    return make_parts(max_running=1, max_waiting=0, executor=partial(FakeExecutor, step_s=step_s))


async def submit(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Request:
    request = engine.request(TokenPrompt(token_ids=tuple(prompt)), {"seed": 0, "max_tokens": max_tokens})
    await engine.submit(request)
    return request


class TestPatience:
    async def test_a_drain_tells_those_who_wait_at_the_door(self, autojump_clock: MockClock) -> None:
        told: list[RequestError] = []

        async def one() -> None:
            try:
                await ask(engine, [1, 2, 3], {"max_tokens": 80}, patience_s=3600)
            except RequestError as error:
                told.append(error)

        async with line(one_place()) as engine, trio.open_nursery() as nursery:
            for _ in range(21):
                nursery.start_soon(one)
            await trio.sleep(0.1)
            await engine.drain(0.1)
        assert len(told) == 21
        assert all(isinstance(error, Unavailable) for error in told)

    async def test_the_patient_are_served_in_their_order_and_before_newcomers(self, autojump_clock: MockClock) -> None:
        served: list[int] = []

        async def one(i: int) -> None:
            await ask(engine, [i, 2, 3], {"max_tokens": 5}, patience_s=1000)
            served.append(i)

        async with line(one_place()) as engine, trio.open_nursery() as nursery:
            for i in range(6):
                nursery.start_soon(one, i)
                await trio.sleep(0.001)
        assert served == list(range(6))

    async def test_a_deadline_counts_at_the_door(self, autojump_clock: MockClock) -> None:
        async with line(one_place(step_s=1)) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, [1, 2, 3], {"max_tokens": 50})
            await trio.sleep(0.1)
            started = trio.current_time()
            with pytest.raises(TimedOut):
                await ask(engine, [1], {"max_tokens": 5}, patience_s=30, timeout_s=2)
            assert trio.current_time() - started < 3

    async def test_those_who_wait_hear_that_the_line_has_died(self, autojump_clock: MockClock) -> None:
        parts = make_parts(max_running=1, max_waiting=0, executor=partial(FakeExecutor, fail_at=20))
        engine, told = make_engine(parts), list[RequestError]()

        async def run_engine() -> None:
            with suppress(EngineDied):
                await engine.run()

        async def one() -> None:
            try:
                await ask(engine, [1, 2, 3], {"max_tokens": 80}, patience_s=3600)
            except RequestError as error:
                told.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_engine)
            await engine.ready.wait()
            nursery.start_soon(one)
            nursery.start_soon(one)
        assert len(told) == 2
        assert trio.current_time() < 100


class TestGuesses:
    async def test_choices_fork_from_the_prompt_and_not_from_a_guess(self, autojump_clock: MockClock) -> None:
        parts = make_parts(max_step_tokens=8, num_guesses=3, executor=partial(FakeExecutor, model=humming))
        prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]  # Eight in the first step, then one alone.
        async with line(parts) as engine:
            texts = await ask(engine, prompt, {"max_tokens": 6, "n": 2})
        assert texts == {choice: text_of(answer(prompt, 6, choice, model=humming)) for choice in range(2)}

    async def test_one_streams_guesses_take_no_step_from_another(self, autojump_clock: MockClock) -> None:
        def round_and_round(tokens: Sequence[int], choice: int, seed: int) -> int:
            return (tokens[-1] + 1) % 7

        executor = partial(FakeExecutor, model=round_and_round)
        parts = make_parts(max_step_tokens=8, num_guesses=7, num_blocks=400, max_model_len=400, executor=executor)
        longest: list[float] = []

        async def one(i: int) -> None:
            request = await submit(engine, [i, *range(7), *range(7)], 300)
            times = []
            while await engine.receive(request) is not None:
                times.append(trio.current_time())
            engine.close(request)
            longest.append(max(later - sooner for sooner, later in itertools.pairwise(times)))

        async with line(parts) as engine, trio.open_nursery() as nursery:
            for i in range(6):
                nursery.start_soon(one, i)
        assert max(longest) < 0.2


class TestReaders:
    async def test_resumed_streams_do_not_hold_up_a_prompt(self, autojump_clock: MockClock) -> None:
        ends: dict[str, float] = {}

        async def read(name: str, request: Request) -> None:
            while await engine.receive(request) is not None:
                pass
            ends[name] = trio.current_time()
            engine.close(request)

        parts = make_parts(max_running=2, max_step_tokens=8, num_blocks=300, max_model_len=400)
        async with line(parts, mailbox_deltas=2) as engine, trio.open_nursery() as nursery:
            parked = [await submit(engine, [i, 2], 200) for i in range(2)]
            await trio.sleep(1)
            prompt = await submit(engine, range(100), 4)
            await trio.sleep(0.035)
            for name, request in zip(("first", "second", "prompt"), (*parked, prompt), strict=True):
                nursery.start_soon(read, name, request)
        assert min(ends, key=lambda name: ends[name]) == "prompt"

    async def test_a_slow_reader_that_reads_is_not_ended(self, autojump_clock: MockClock) -> None:
        parts = make_parts(num_blocks=200, max_model_len=400, park_timeout_s=60)
        async with line(parts, mailbox_deltas=64) as engine:
            request = await submit(engine, [1, 2], 300)
            text = ""
            while (delta := await engine.receive(request)) is not None:
                assert delta.error is None
                text += delta.text
                await trio.sleep(2.5)
            engine.close(request)
        assert text == text_of(answer([1, 2], 300))

    def test_an_error_is_the_last_delta(self) -> None:
        box = Mailbox(max_deltas=1, num_choices=2, clock=lambda: 0.0)
        for choice, text in ((0, "a"), (0, "b"), (1, "c")):
            box.put(Delta(choice=choice, text=text))
        box.put(Delta(choice=0, error=RequestFailed("broken")))
        taken = [box.receive_nowait() for _ in range(3)]
        assert [delta and delta.error is not None for delta in taken] == [False, False, True]

    async def test_computing_again_after_a_preemption_is_prefill(self, autojump_clock: MockClock) -> None:
        states: set[str] = set()

        async def look() -> None:
            while True:
                for live in engine._planner._running:
                    if live.num_preemptions and live.todo > 4:
                        states.add(live.request.timeline.state)  # type: ignore[attr-defined]
                await trio.sleep(0.002)

        parts = make_parts(num_blocks=12, max_running=4, max_step_tokens=4)
        async with line(parts) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(look)
            async with trio.open_nursery() as clients:
                for i in range(2):
                    clients.start_soon(ask, engine, range(20 * i, 20 * i + 16), {"max_tokens": 20})
            nursery.cancel_scope.cancel()
        assert states == {"prefill"}


class TestOtherPeoplesCode:
    async def test_a_token_that_only_the_tokenizer_knows_is_refused(self, autojump_clock: MockClock) -> None:
        class Embedding(FakeExecutor):
            def run(self, step: Step) -> StepResult:
                assert all(token < VOCAB_SIZE for token in step.tokens), "index out of range"
                return super().run(step)

        async with line(make_parts(executor=Embedding)) as engine:
            request = engine.request(TextPrompt(text="5000"), {"max_tokens": 3})
            await engine.submit(request)
            delta = await engine.receive(request)
            engine.close(request)
            assert delta is not None
            assert isinstance(delta.error, BadRequest)
            assert await ask(engine, [1], {"max_tokens": 1})

    async def test_a_panic_in_the_tokenizer_ends_one_request(self, autojump_clock: MockClock) -> None:
        class Panic(BaseException):
            """As extensions in Rust raise it."""

        async def off_loop(function: Callable[[], T], /) -> T:
            await trio.lowlevel.checkpoint()
            raise Panic("index out of bounds")

        parts = msgspec.structs.replace(make_parts(), off_loop=off_loop)
        async with line(parts) as engine:
            request = engine.request(TextPrompt(text="1"), {"max_tokens": 3})
            await engine.submit(request)
            delta = await engine.receive(request)
            engine.close(request)
            assert delta is not None
            assert isinstance(delta.error, RequestFailed)
            assert await ask(engine, [1], {"max_tokens": 1})

    async def test_what_is_tokenized_while_the_line_drains_ends_quietly(self, autojump_clock: MockClock) -> None:
        async def slow(function: Callable[[], T], /) -> T:
            await trio.sleep(5)
            return function()

        parts = msgspec.structs.replace(make_parts(), off_loop=slow)
        with structlog.testing.capture_logs() as logs:
            async with line(parts) as engine:
                request = engine.request(TextPrompt(text="1 2 3"), {"max_tokens": 3})
                await engine.submit(request)
                await trio.sleep(1)
                await engine.drain(0)
                delta = await engine.receive(request)
                engine.close(request)
        assert delta is not None
        assert isinstance(delta.error, Unavailable)
        assert [entry for entry in logs if "failed" in entry["event"]] == []

    async def test_a_drain_while_loading_stops_the_start(self, autojump_clock: MockClock) -> None:
        class Loading(Engine):
            async def _load(self, progress: object) -> Parts:
                await trio.sleep(5)
                return make_parts()

        engine = Loading(Settings())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            await trio.sleep(1)
            await engine.drain(1)
        assert engine.state == "dead"
        assert engine.info is None

    def test_a_program_without_trio_hears_why_the_line_died(self) -> None:
        def ask_for_more() -> None:
            with run(make_engine(make_parts(executor=partial(FakeExecutor, fail_at=3)))) as llm:
                llm.complete([1, 2, 3], max_tokens=50, seed=0)

        with pytest.raises(EngineDied, match="on purpose"):
            ask_for_more()
