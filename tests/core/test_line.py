"""The whole line with a fake model: random arrivals, lengths, cancels, slow readers, preemptions and forks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from headrace.core.engine import Engine, Parts
from headrace.core.kv.blocks import BlockPool
from headrace.hooks.errors import (
    BadRequest,
    ContextTooLong,
    EngineDied,
    Overloaded,
    RequestFailed,
    TimedOut,
    Unavailable,
)
from headrace.hooks.messages import ChatPrompt, TextPrompt, TokenPrompt
from headrace.hooks.protocols import RequestEnded
from headrace.hooks.settings import Settings
from tests.fakes import (
    END_ID,
    NAN_ID,
    FakeExecutor,
    Model,
    answer,
    ask,
    counting,
    humming,
    make_engine,
    make_parts,
    next_token,
    text_of,
)


@asynccontextmanager
async def line(parts: Parts, *, mailbox_deltas: int = 64) -> AsyncIterator[Engine]:
    """A running engine; drained at the end, and then nothing may be held any more."""
    engine = make_engine(parts, mailbox_deltas=mailbox_deltas)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await engine.ready.wait()
        yield engine
        await engine.drain(1000)
    check_nothing_is_held(engine)


def check_nothing_is_held(engine: Engine) -> None:
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.parked) == (0, 0, 0)
    assert (statistics.blocks_used, statistics.slots_used) == (0, 0)
    assert (engine.num_live, len(engine._credits), engine._credits.num_sequences, engine._credits.num_tokens) == (
        0,
        0,
        0,
        0,
    )
    engine._planner.pool.check()


class TestOneRequest:
    async def test_it_gets_exactly_its_tokens(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine:
            assert await ask(engine, [5, 6, 7], {"max_tokens": 20}) == {0: text_of(answer([5, 6, 7], 20))}

    async def test_a_conversation_goes_through_the_template(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine:
            prompt = ChatPrompt(messages=({"role": "user", "content": "5 6"}, {"role": "user", "content": "7"}))
            request = engine.request(prompt, {"max_tokens": 3, "seed": 0})
            await engine.submit(request)
            texts = [delta.text for delta in [await engine.receive(request) for _ in range(3)] if delta]
            assert "".join(texts) == text_of(answer([5, 6, 7], 3))
            engine.close(request)

    async def test_the_answer_goes_to_the_end_of_the_context_when_no_limit_is_given(
        self, autojump_clock: MockClock
    ) -> None:
        async with line(make_parts(max_model_len=50)) as engine:
            texts = await ask(engine, [1] * 10)
            assert len(texts[0].split()) == 40

    async def test_choices_fork_from_one_prompt_and_each_gets_its_own_text(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine:
            texts = await ask(engine, list(range(10)), {"n": 5, "max_tokens": 12})
            assert texts == {choice: text_of(answer(range(10), 12, choice)) for choice in range(5)}
            assert engine.statistics().prompt_tokens_total == 10

    async def test_an_end_token_ends_it_and_counts_but_is_no_text(self, autojump_clock: MockClock) -> None:
        def ends(tokens: list[int], choice: int, seed: int) -> int:
            return END_ID if len(tokens) == 6 else 1

        parts = make_parts(executor=lambda pool: FakeExecutor(pool, model=ends))
        async with line(parts) as engine:
            request = engine.request(TokenPrompt(token_ids=(1, 2, 3)), {"max_tokens": 50})
            await engine.submit(request)
            deltas = [delta async for delta in drain(engine, request)]
            engine.close(request)
        assert "".join(delta.text for delta in deltas) == "1 1 1 "
        assert deltas[-1].finish == "stop"
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion == 4

    async def test_ignore_eos_goes_on(self, autojump_clock: MockClock) -> None:
        parts = make_parts(executor=lambda pool: FakeExecutor(pool, model=lambda *_: END_ID))
        async with line(parts) as engine:
            texts = await ask(engine, [1], {"max_tokens": 3, "ignore_eos": True})
        assert texts[0] == text_of([END_ID] * 3)

    async def test_a_stop_string_over_token_borders_ends_it_before_the_string(self, autojump_clock: MockClock) -> None:
        parts = make_parts(executor=lambda pool: FakeExecutor(pool, model=counting))
        async with line(parts) as engine:
            request = engine.request(TokenPrompt(token_ids=(10,)), {"stop": ["4 15"], "max_tokens": 50})
            await engine.submit(request)
            deltas = [delta async for delta in drain(engine, request)]
            engine.close(request)
        assert "".join(delta.text for delta in deltas) == "11 12 13 1"
        assert deltas[-1].finish == "stop"
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion == 5

    async def test_a_row_without_a_usable_logit_fails_its_request_alone(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine, trio.open_nursery() as nursery:
            good: dict[int, str] = {}

            async def other() -> None:
                good.update(await ask(engine, [1, 2], {"max_tokens": 30}))

            nursery.start_soon(other)
            with pytest.raises(RequestFailed, match="NaN"):
                await ask(engine, [5, NAN_ID], {"max_tokens": 30})
        assert good == {0: text_of(answer([1, 2], 30))}

    async def test_a_deadline_ends_it(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine:
            with pytest.raises(TimedOut):
                await ask(engine, [1], {"max_tokens": 150}, timeout_s=0.5)

    async def test_its_states_sum_to_its_wall_time(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine:
            request = engine.request(TokenPrompt(token_ids=tuple(range(80))), {"max_tokens": 20})
            await engine.submit(request)
            async for _ in drain(engine, request):
                pass
            report = engine.close(request)
        states = {key: value for key, value in report.items() if key.endswith("_ms") and "span" not in key}
        total = sum(
            float(str(states[f"{state}_ms"])) for state in ("queued", "prefill", "decode", "delivering", "other")
        )
        assert abs(total - float(str(report["wall_ms"]))) < 1
        assert float(str(report["prefill_ms"])) >= 20, "eighty tokens take three steps of thirty-two"
        assert float(str(report["decode_ms"])) > 100


async def drain(engine: Engine, request) -> AsyncIterator:  # type: ignore[no-untyped-def, type-arg]
    while (delta := await engine.receive(request)) is not None:
        yield delta


class TestAtTheDoor:
    async def test_a_full_line_refuses_with_the_seconds_to_wait(self, autojump_clock: MockClock) -> None:
        parts = make_parts(max_running=1, max_waiting=1)
        async with line(parts) as engine:
            requests = [engine.request(TokenPrompt(token_ids=(1,)), {"max_tokens": 5}) for _ in range(3)]
            for request in requests:
                await engine.submit(request)
            refused = await engine.receive(requests[2])
            assert refused is not None
            assert isinstance(refused.error, Overloaded)
            assert refused.error.retry_after_s is not None
            assert refused.error.retry_after_s >= 1
            for request in requests:
                async for _ in drain(engine, request):
                    pass
                engine.close(request)

    async def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(self, autojump_clock: MockClock) -> None:
        async with line(make_parts(max_model_len=50)) as engine:
            with pytest.raises(ContextTooLong, match=r"50 tokens.*found 50 tokens"):
                await ask(engine, [1] * 50)

    @pytest.mark.parametrize(
        ("params", "reason"),
        [
            ({"temperature": -1}, "temperature"),
            ({"top_p": 1.5}, "top_p"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"n": 1000}, "n"),
            ({"logit_bias": {"1000": 1}}, "logit_bias"),
            ({"stop_token_ids": [5000]}, "stop_token_ids"),
            ({"no_such": 1}, "no_such"),
        ],
    )
    async def test_a_parameter_out_of_range_is_refused_by_name(
        self, params: dict[str, object], reason: str, autojump_clock: MockClock
    ) -> None:
        async with line(make_parts()) as engine:
            with pytest.raises(BadRequest, match=reason):
                await ask(engine, [1], params)

    async def test_token_ids_outside_the_embedding_are_refused(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine:
            for ids in ([1, 1000], [-3]):
                with pytest.raises(BadRequest, match="< 1000"):
                    await ask(engine, ids)


class TestSharing:
    async def test_a_prefix_that_is_being_computed_is_waited_for_and_computed_once(
        self, autojump_clock: MockClock
    ) -> None:
        executor: list[FakeExecutor] = []

        def keep(pool: BlockPool) -> FakeExecutor:
            executor.append(FakeExecutor(pool))
            return executor[0]

        prefix = list(range(100))
        texts: dict[int, dict[int, str]] = {}
        async with line(make_parts(num_blocks=400, executor=keep)) as engine, trio.open_nursery() as nursery:

            async def one(i: int) -> None:
                texts[i] = await ask(engine, [*prefix, 500 + i], {"max_tokens": 5})

            for i in range(8):
                nursery.start_soon(one, i)
        for i in range(8):
            assert texts[i] == {0: text_of(answer([*prefix, 500 + i], 5))}
        computed = sum(row.num_tokens for step in executor[0].steps for row in step.rows if not row.decode)
        assert computed == 100 + 8, "the prefix once, and each request's own token"

    async def test_tenants_do_not_share(self, autojump_clock: MockClock) -> None:
        async with line(make_parts()) as engine:
            await ask(engine, list(range(40)), {"max_tokens": 2}, tenant="a")
            await ask(engine, list(range(40)), {"max_tokens": 2}, tenant="b")
            assert engine.statistics().cached_tokens_total == 0
            await ask(engine, list(range(40)), {"max_tokens": 2}, tenant="a")
            assert engine.statistics().cached_tokens_total == 36, "one token is left to compute, so nine blocks of ten"

    async def test_four_answers_in_a_pool_that_holds_one_and_a_half_all_come_out_right(
        self, autojump_clock: MockClock
    ) -> None:
        parts = make_parts(num_blocks=8, block_size=16, max_model_len=128)
        texts: dict[int, dict[int, str]] = {}
        async with line(parts) as engine, trio.open_nursery() as nursery:

            async def one(i: int) -> None:
                texts[i] = await ask(engine, [i] * 30, {"max_tokens": 60})

            for i in range(4):
                nursery.start_soon(one, i)
        assert texts == {i: {0: text_of(answer([i] * 30, 60))} for i in range(4)}
        assert 0 < engine.statistics().preemptions_total < 20


class TestSlowReaders:
    async def test_a_reader_that_stays_away_parks_its_request_and_holds_up_nobody(
        self, autojump_clock: MockClock
    ) -> None:
        parts = make_parts(num_blocks=400, max_model_len=1000)
        async with line(parts, mailbox_deltas=8) as engine:
            slow = engine.request(TokenPrompt(token_ids=(1, 2)), {"max_tokens": 500, "seed": 0})
            await engine.submit(slow)
            texts = await ask(engine, [3, 4], {"max_tokens": 100})
            assert texts == {0: text_of(answer([3, 4], 100))}
            assert slow.mailbox.parked
            assert engine.statistics().parked == 1
            assert slow.num_output_tokens <= 8 + 3
            text = "".join([delta.text async for delta in drain(engine, slow)])
            assert text == text_of(answer([1, 2], 500))
            report = engine.close(slow)
            assert float(str(report["parked_ms"])) > 500

    async def test_a_parked_requests_blocks_go_when_others_need_them(self, autojump_clock: MockClock) -> None:
        parts = make_parts(num_blocks=30, block_size=4, max_model_len=100)
        async with line(parts, mailbox_deltas=4) as engine:
            slow = engine.request(TokenPrompt(token_ids=tuple(range(60))), {"max_tokens": 30, "seed": 0})
            await engine.submit(slow)
            await trio.sleep(1)
            texts = await ask(engine, list(range(200, 280)), {"max_tokens": 15})
            assert texts == {0: text_of(answer(range(200, 280), 15))}
            text = "".join([delta.text async for delta in drain(engine, slow)])
            assert text == text_of(answer(range(60), 30))
            engine.close(slow)

    async def test_parked_too_long_is_an_error(self, autojump_clock: MockClock) -> None:
        async with line(make_parts(park_timeout_s=5), mailbox_deltas=4) as engine:
            slow = engine.request(TokenPrompt(token_ids=(1,)), {"max_tokens": 100})
            await engine.submit(slow)
            await trio.sleep(20)
            errors = [delta.error async for delta in drain(engine, slow) if delta.error]
            assert len(errors) == 1
            assert isinstance(errors[0], TimedOut)
            engine.close(slow)


class TestTheEnd:
    async def test_a_drain_lets_live_requests_finish(self, autojump_clock: MockClock) -> None:
        async with trio.open_nursery() as nursery:
            engine = make_engine(make_parts())
            nursery.start_soon(engine.run)
            await engine.ready.wait()
            texts: dict[int, str] = {}

            async def one() -> None:
                texts.update(await ask(engine, [1, 2], {"max_tokens": 50}))

            nursery.start_soon(one)
            await trio.sleep(0.1)
            report = await engine.drain(60)
        assert (report.finished, report.cut) == (1, 0)
        assert texts == {0: text_of(answer([1, 2], 50))}
        check_nothing_is_held(engine)

    async def test_a_drain_ends_the_rest_with_an_error_when_its_time_is_over(self, autojump_clock: MockClock) -> None:
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:
            engine = make_engine(make_parts())
            nursery.start_soon(engine.run)
            await engine.ready.wait()

            async def one() -> None:
                try:
                    await ask(engine, [1, 2], {"max_tokens": 150})
                except Unavailable as error:
                    errors.append(error)

            nursery.start_soon(one)
            await trio.sleep(0.1)
            report = await engine.drain(0.2)
            with pytest.raises(Unavailable):
                engine.request(TokenPrompt(token_ids=(1,)), {})
        assert (report.finished, report.cut, len(errors)) == (0, 1, 1)
        check_nothing_is_held(engine)

    async def test_a_stage_that_fails_tells_every_live_request_and_ends_the_run(
        self, autojump_clock: MockClock
    ) -> None:
        engine = make_engine(make_parts(executor=lambda pool: FakeExecutor(pool, fail_at=10)))
        errors: list[Exception] = []

        died: list[str] = []

        async def run() -> None:
            try:
                await engine.run()
            except EngineDied as error:
                died.append(str(error))

        async def one(i: int) -> None:
            try:
                await ask(engine, [i, 2], {"max_tokens": 150})
            except Unavailable as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await engine.ready.wait()
            for i in range(3):
                nursery.start_soon(one, i)
        assert "on purpose" in died[0]
        assert len(errors) == 3
        assert all("on purpose" in str(error) for error in errors)
        assert engine.state == "dead"


@pytest.mark.parametrize("seed", range(12))
async def test_every_request_gets_exactly_its_tokens_or_its_error_and_everything_comes_back(
    seed: int, autojump_clock: MockClock
) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4, 16])
    parts = make_parts(
        block_size=block_size,
        num_blocks=rng.choice([90, 140, 600]) // block_size + 1,
        max_running=rng.choice([2, 5, 16]),
        max_waiting=rng.choice([2, 100]),
        max_step_tokens=rng.choice([block_size, 16, 64]),
        max_model_len=80,
        prefix_cache=rng.random() < 0.8,
    )
    async with line(parts, mailbox_deltas=rng.choice([1, 4, 64])) as engine, trio.open_nursery() as nursery:
        for i in range(60):
            nursery.start_soon(client, engine, random.Random(1000 * seed + i))
    assert all(inbox.statistics().depth == 0 for inbox in engine._inboxes)


async def test_observers_hear_what_a_request_asked_and_why_its_choices_ended(autojump_clock: MockClock) -> None:
    heard: list[RequestEnded] = []

    class Noting:
        def on(self, event: object) -> None:
            heard.extend([event] if isinstance(event, RequestEnded) else [])

    engine = Engine(Settings(), parts=make_parts(), observers=[Noting()])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await engine.ready.wait()
        await ask(engine, range(3), {"max_tokens": 5, "n": 2, "ignore_eos": True})
        for prompt in (ChatPrompt(messages=({"role": "user", "content": "Hi"},)), TextPrompt(text="Hi")):
            engine.close(engine.request(prompt, {}, tenant="app"), status=499)
        name = engine.info.name if engine.info else ""
        await engine.drain(1)
    assert (heard[0].finish, heard[0].n, heard[0].max_tokens) == (("length", "length"), 2, 5)
    assert [(event.endpoint, event.model, event.tenant) for event in heard] == [
        ("completion", name, ""),
        ("chat", name, "app"),
        ("completion", name, "app"),
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_guessing_ahead_changes_no_token(seed: int, autojump_clock: MockClock) -> None:
    rng = random.Random(seed)
    parts = make_parts(
        num_blocks=rng.choice([40, 500]),
        max_running=rng.choice([3, 16]),
        max_waiting=100,
        max_step_tokens=rng.choice([16, 64]),
        max_model_len=100,
        num_guesses=rng.choice([1, 3, 8]),
        executor=lambda pool: FakeExecutor(pool, model=humming),
    )
    async with line(parts) as engine, trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(client, engine, random.Random(1000 * seed + i), humming, 100)
    statistics = engine.statistics()
    assert 0 < statistics.kept_tokens_total < statistics.guessed_tokens_total
    assert 0 < statistics.drafts_total <= statistics.guessed_tokens_total
    assert sum(statistics.kept_by_position) == statistics.kept_tokens_total
    assert statistics.kept_by_position == tuple(sorted(statistics.kept_by_position, reverse=True))


async def test_a_text_that_repeats_its_prompt_takes_few_steps(autojump_clock: MockClock) -> None:
    parts = make_parts(num_guesses=4, executor=lambda pool: FakeExecutor(pool, model=lambda tokens, *_: tokens[-12]))
    async with line(parts) as engine:
        texts = await ask(engine, range(12), {"max_tokens": 120})
    assert texts == {0: text_of([i % 12 for i in range(120)])}
    assert engine.statistics().steps_total < 120 / 1.5


async def client(engine: Engine, rng: random.Random, model: Model = next_token, max_len: int = 80) -> None:
    """One client with habits of its own: late, impatient, slow, or all of them."""
    await trio.sleep(rng.uniform(0, 2))
    shared = [7] * rng.choice([0, 10, 33])
    prompt = shared + [rng.randrange(900) for _ in range(rng.randint(1, 30))]
    n, max_tokens = rng.choice([1, 1, 1, 2, 4]), rng.randint(1, 60)
    seed = rng.choice([0, 5])
    params: dict[str, object] = {"n": n, "max_tokens": max_tokens, "seed": seed}
    request = engine.request(TokenPrompt(token_ids=tuple(prompt)), params)
    leaves_after = rng.choice([None, None, None, rng.randint(0, 20)])
    pause_s = rng.choice([0, 0, 0.05, 0.5])
    texts = dict.fromkeys(range(n), "")
    error: Exception | None = None
    try:
        await engine.submit(request)
        while (delta := await engine.receive(request)) is not None:
            error = delta.error
            texts[delta.choice] += delta.text
            if leaves_after is not None and sum(len(text) for text in texts.values()) >= leaves_after:
                break
            await trio.sleep(pause_s * rng.random())
        else:
            if error is None:
                limit = min(max_tokens, max_len - len(prompt))
                assert texts == {choice: text_of(answer(prompt, limit, choice, seed, model)) for choice in range(n)}
            else:
                assert isinstance(error, Overloaded | ContextTooLong)
        whole = {choice: text_of(answer(prompt, max_len, choice, seed, model)) for choice in range(n)}
        assert all(whole[choice].startswith(text) for choice, text in texts.items())
    finally:
        report = engine.close(request)
    states = [
        float(str(value))
        for key, value in report.items()
        if key.endswith("_ms") and "span" not in key and key not in ("ttft_ms", "wall_ms")
    ]
    assert abs(sum(states) - float(str(report["wall_ms"]))) < 1
