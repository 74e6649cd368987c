"""Another stack while the line runs: who is answered by which, who waits, what fails. The executor is a fake."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headrace.core.engine import Engine, Parts
from headrace.core.parts import Restacked
from headrace.hooks.components import Bound
from headrace.hooks.errors import BadRequest, ConfigError, Conflict, StartError, Unavailable
from headrace.hooks.messages import Admit, ChatPrompt, Request, Step, TokenPrompt
from headrace.hooks.origins import Where
from headrace.hooks.protocols import Event, Load, Rendered, RequestEnded
from headrace.hooks.settings import Line, Sampling, Settings
from headrace.hooks.stack import Stack
from tests.core.test_line import check_nothing_is_held
from tests.fakes import FakeExecutor, FakeSampler, answer, bound, make_parts, next_token, text_of

# ── a line whose stacks can be told by what they draw ─────────────────────────────────────────────────────────────


def drawn_by(revision: int) -> Callable[[Sequence[int], int, int], int]:
    """What the fake model says where a stack of this revision draws."""
    return lambda tokens, choice=0, seed=0: (next_token(tokens, choice, seed) + 13 * revision) % 998


class StackedExecutor(FakeExecutor):
    """Draws for each slot as the stack does that it was admitted with. Notes the stacks of each step."""

    def __init__(self, pool: Any, **rest: Any) -> None:
        super().__init__(pool, **rest)
        self.revisions: dict[int, int] = {}
        self.together: list[set[int]] = []
        self._seen: int | None = None

    def _operate(self, step: Step) -> None:
        super()._operate(step)
        for op in step.slot_ops:
            if isinstance(op, Admit):
                assert op.stack is not None
                self.revisions[op.slot] = op.stack.revision
        self.together.append({self.revisions[slot] for slot in step.sample_slots})
        slots = iter(step.sample_slots)
        self._model = lambda *tokens: drawn_by(self.revisions[next(slots)])(*tokens)


class Builder:
    """In place of `core.restack`: stack after stack, or what *error* says; *fields* go into each."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.fields: dict[str, Any] = {}
        self.defaults: Mapping[str, object] = {}
        self.going = trio.Event()
        self.going.set()

    async def __call__(
        self, settings: Settings, before: Settings, where: Callable[[str], Where], old: Stack, /
    ) -> Restacked:
        await self.going.wait()
        if self.error is not None:
            raise self.error
        revision = old.revision + 1
        fields = {"revision": revision, "fingerprint": f"fake-{revision}", **self.fields}
        return Restacked(stack=msgspec.structs.replace(old, **fields), defaults=self.defaults)


class Setup:
    """A running engine, what builds its stacks, and its executor."""

    def __init__(self, engine: Engine, builder: Builder, executor: StackedExecutor) -> None:
        self.engine = engine
        self.builder = builder
        self.executor = executor


@asynccontextmanager
async def line(**rest: Any) -> AsyncIterator[Setup]:
    executors: list[StackedExecutor] = []

    def executor(pool: Any) -> StackedExecutor:
        executors.append(StackedExecutor(pool))
        return executors[-1]

    builder = Builder()
    parts: Parts = msgspec.structs.replace(make_parts(executor=executor, **rest), restack=builder)
    engine = Engine(Settings(line=Line()), parts=parts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await engine.ready.wait()
        yield Setup(engine, builder, executors[0])
        await engine.drain(1000)
    check_nothing_is_held(engine)


class Asked:
    """One request that runs beside the test."""

    def __init__(self, setup: Setup, prompt: Sequence[int], max_tokens: int = 20) -> None:
        self.engine = setup.engine
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.request: Request = setup.engine.request(
            TokenPrompt(token_ids=tuple(prompt)), {"seed": 0, "max_tokens": max_tokens}
        )
        self.text = ""
        self.begun = trio.Event()

    async def read(self) -> None:
        try:
            await self.engine.submit(self.request)
            while (delta := await self.engine.receive(self.request)) is not None:
                if delta.error is not None:
                    raise delta.error
                self.text += delta.text
                self.begun.set()
        finally:
            self.engine.close(self.request)

    def check(self, revision: int) -> None:
        """It was answered by this stack, whole."""
        assert self.request.stack is not None
        assert self.request.stack.revision == revision
        assert self.text == text_of(answer(self.prompt, self.max_tokens, model=drawn_by(revision)))


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_running_requests_keep_their_stack_and_new_ones_get_the_new_one_in_the_same_steps(
    autojump_clock: MockClock,
) -> None:
    async with line() as setup, trio.open_nursery() as nursery:
        old = Asked(setup, [1, 2, 3], 30)
        nursery.start_soon(old.read)
        await old.begun.wait()
        report = await setup.engine.reload()
        assert (report.old, report.new) == ("fake", "fake-1")
        assert setup.engine.info is not None
        assert setup.engine.info.fingerprint == "fake-1"
        new = Asked(setup, [1, 2, 3], 20)
        nursery.start_soon(new.read)
    old.check(0)
    new.check(1)
    assert {0, 1} in setup.executor.together


async def test_requests_that_wait_for_a_place_stay_on_the_stack_they_were_resolved_on(
    autojump_clock: MockClock,
) -> None:
    async with line(max_running=1, max_waiting=8) as setup, trio.open_nursery() as nursery:
        asked = [Asked(setup, [7, index]) for index in range(4)]
        for each in asked:
            nursery.start_soon(each.read)
        await asked[0].begun.wait()
        await setup.engine.reload()
        late = Asked(setup, [7, 9])
        nursery.start_soon(late.read)
    for each in asked:
        each.check(0)
    late.check(1)


async def test_one_that_was_made_before_and_submitted_after_stays_on_the_old_stack(autojump_clock: MockClock) -> None:
    async with line() as setup:
        made = Asked(setup, [4, 5])
        await setup.engine.reload()
        await made.read()
        made.check(0)


async def test_a_preempted_request_comes_back_to_its_own_stack(autojump_clock: MockClock) -> None:
    async with line(num_blocks=14) as setup, trio.open_nursery() as nursery:
        asked = [Asked(setup, [3, index], 24) for index in range(3)]
        for each in asked:
            nursery.start_soon(each.read)
        await asked[2].begun.wait()
        await setup.engine.reload()
    assert setup.engine.statistics().preemptions_total > 0
    for each in asked:
        each.check(0)


async def test_a_slot_goes_from_a_request_of_one_stack_to_one_of_another_and_nothing_stays(
    autojump_clock: MockClock,
) -> None:
    async with line(max_running=2, max_waiting=0) as setup:
        for revision in range(6):
            async with trio.open_nursery() as nursery:
                asked = [Asked(setup, [revision, index]) for index in range(2)]
                for each in asked:
                    nursery.start_soon(each.read)
            for each in asked:
                each.check(revision)
            await setup.engine.reload()
    assert set(setup.executor.revisions) == {0, 1}


async def test_a_stack_goes_with_its_last_request(autojump_clock: MockClock) -> None:
    async with line() as setup:
        setup.builder.fields = {"sampler": bound("odd", FakeSampler())}
        await setup.engine.reload()
        gone = weakref.ref(setup.engine._stack.sampler.component)
        old = Asked(setup, [1])
        setup.builder.fields = {"sampler": bound("even", FakeSampler())}
        await setup.engine.reload()
        await old.read()
        assert gone() is not None
        del old
        for _ in range(3):  # Idle stages remember the last request they had.
            await Asked(setup, [2]).read()
        del setup.executor.steps[:-1]
        gc.collect()
        assert gone() is None


async def test_defaults_change_with_the_stack(autojump_clock: MockClock) -> None:
    async with line() as setup:
        before = Asked(setup, [1])
        setup.builder.defaults = {"top_p": 0.5}
        await setup.engine.reload()
        with pytest.raises(BadRequest, match="needs the logits processor top-p"):
            setup.engine.request(TokenPrompt(token_ids=(1,)), {})
        await before.read()
        before.check(0)


async def test_locks_change_with_the_settings(autojump_clock: MockClock) -> None:
    async with line() as setup:
        await setup.engine.reload(Settings(sampling=Sampling(locked=("seed",))))
        with pytest.raises(BadRequest, match="seed is fixed by the operator"):
            setup.engine.request(TokenPrompt(token_ids=(1,)), {"seed": 3})


class Shout:
    """A chat template that says a number of its own first."""

    def __init__(self, number: int) -> None:
        self.number = number

    def render(self, prompt: ChatPrompt) -> Rendered:
        return Rendered(text=" ".join([str(self.number), *(str(each["content"]) for each in prompt.messages)]))


async def test_a_conversation_is_rendered_by_the_template_of_its_request(autojump_clock: MockClock) -> None:
    async with line() as setup:
        prompt = ChatPrompt(messages=({"role": "user", "content": "5 6"},))
        old = setup.engine.request(prompt, {"seed": 0, "max_tokens": 3, "return_token_ids": True})
        setup.builder.fields = {"chat_template": bound("shout", Shout(77))}
        await setup.engine.reload()
        new = setup.engine.request(prompt, {"seed": 0, "max_tokens": 3, "return_token_ids": True})
        for request in (old, new):
            await setup.engine.submit(request)
            while await setup.engine.receive(request) is not None:
                pass
            setup.engine.close(request)
        assert (old.prompt_ids.tolist(), new.prompt_ids.tolist()) == ([5, 6], [77, 5, 6])
        assert await setup.engine.codec.render(prompt) == "77 5 6"


# ── around the line ───────────────────────────────────────────────────────────────────────────────────────────────


class LastFirst:
    """Who came last starts first."""

    def order(self, waiting: Any, now: float) -> tuple[float, ...]:
        return (-waiting.arrival,)

    def victim(self, running: Any) -> tuple[float, ...]:
        return (-running.arrival,)


async def test_another_policy_orders_those_that_wait_already(autojump_clock: MockClock) -> None:
    async with line(max_running=1, max_waiting=8) as setup, trio.open_nursery() as nursery:
        ended: list[int] = []

        async def read(index: int, asked: Asked) -> None:
            await asked.read()
            ended.append(index)

        asked = [Asked(setup, [1, 1], 5)]
        nursery.start_soon(read, 0, asked[0])
        await asked[0].begun.wait()
        for index in range(1, 4):
            await trio.sleep(0.001)
            asked.append(Asked(setup, [1, index], 5))
            nursery.start_soon(read, index, asked[-1])
        await trio.sleep(0.001)
        setup.builder.fields = {"policy": bound("last-first", LastFirst())}
        await setup.engine.reload()
    assert ended == [0, 3, 2, 1]


class Broken(LastFirst):
    def order(self, waiting: Any, now: float) -> tuple[float, ...]:
        raise ZeroDivisionError("on purpose")


async def test_a_new_policy_that_fails_leaves_them_in_the_order_of_arrival(autojump_clock: MockClock) -> None:
    async with line(max_running=1, max_waiting=8) as setup, trio.open_nursery() as nursery:
        asked = [Asked(setup, [1, index], 5) for index in range(4)]
        for each in asked:
            nursery.start_soon(each.read)
        await asked[0].begun.wait()
        setup.builder.fields = {"policy": bound("broken", Broken())}
        await setup.engine.reload()
    for each in asked:
        each.check(0)


class Watch:
    """An observer."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.closed = False

    def on(self, event: Event) -> None:
        if isinstance(event, RequestEnded):
            self.ends.append(event.id)

    def close(self) -> None:
        self.closed = True


async def test_the_observers_of_the_new_stack_replace_the_old_ones_at_once(autojump_clock: MockClock) -> None:
    first, second = Watch(), Watch()
    async with line() as setup, trio.open_nursery() as nursery:
        setup.builder.fields = {"observers": (bound("first", first),)}
        await setup.engine.reload()
        asked = Asked(setup, [1], 10)
        nursery.start_soon(asked.read)
        await asked.begun.wait()
        setup.builder.fields = {"observers": (bound("second", second),)}
        await setup.engine.reload()
        assert (first.closed, second.closed) == (True, False)
    assert (first.ends, second.ends) == ([], [asked.request.id])


async def test_an_observer_that_is_taken_over_is_not_closed(autojump_clock: MockClock) -> None:
    watch = Watch()
    async with line() as setup:
        setup.builder.fields = {"observers": (bound("watch", watch),)}
        await setup.engine.reload()
        await setup.engine.reload()
        await Asked(setup, [1], 2).read()
    assert (watch.closed, len(watch.ends)) == (False, 1)


class Gate:
    """Admission that counts."""

    def __init__(self) -> None:
        self.inside = 0

    async def admit(self, request: Request, load: Load) -> None:
        self.inside += 1

    def release(self, request: Request) -> None:
        self.inside -= 1


async def test_each_admission_component_is_told_of_the_ends_of_those_it_let_in(autojump_clock: MockClock) -> None:
    first, second = Gate(), Gate()
    async with line() as setup, trio.open_nursery() as nursery:
        setup.builder.fields = {"admission": (bound("gate", first),)}
        await setup.engine.reload()
        old = Asked(setup, [1], 10)
        nursery.start_soon(old.read)
        await old.begun.wait()
        setup.builder.fields = {"admission": (bound("gate", second),)}
        await setup.engine.reload()
        new = Asked(setup, [2], 10)
        nursery.start_soon(new.read)
        await new.begun.wait()
        assert (first.inside, second.inside) == (1, 1)
    assert (first.inside, second.inside) == (0, 0)


# ── costs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def revised(name: str, revision: int) -> Bound:
    return Bound(name=name, plugin="acme", component=FakeSampler(), revision=revision)


async def test_what_plugins_cost_is_never_less_than_before_and_quarantine_ends_with_a_reload(
    autojump_clock: MockClock,
) -> None:
    async with line() as setup:
        for revision in range(1, 5):
            sampler = revised("odd", revision)
            setup.builder.fields = {"sampler": sampler}
            await setup.engine.reload()
            account = setup.engine._ledger.account("sampler", sampler)
            assert account.quarantined is None
            for _ in range(5):
                account.failed("on purpose")
            (cost,) = [each for each in setup.engine.statistics().plugins if each.plugin == "acme"]
            assert (cost.errors, cost.quarantined > 0) == (5 * revision, True)
            with pytest.raises(Unavailable, match="quarantine"):
                setup.engine.request(TokenPrompt(token_ids=(1,)), {"temperature": 1})
        assert len([key for key in setup.engine._ledger._accounts if key[1] == "acme"]) <= 2


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("headrace.toml:1:1: sampling.sampler: no sampler called 'nobody'"),
        ZeroDivisionError("on purpose"),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_stack_that_cannot_be_built_changes_nothing_and_the_reason_is_told(
    error: BaseException, autojump_clock: MockClock
) -> None:
    async with line() as setup:
        engine = setup.engine
        before = (engine._stack, engine.info, engine.defaults, engine._settings)
        setup.builder.error = error
        with pytest.raises(StartError, match=str(error)):
            await engine.reload(Settings(sampling=Sampling(locked=("seed",))))
        assert (engine._stack, engine.info, engine.defaults, engine._settings) == before
        asked = Asked(setup, [1, 2])
        await asked.read()
        asked.check(0)
        setup.builder.error = None
        assert (await engine.reload()).new == "fake-1"


async def test_a_second_reload_at_the_same_time_is_refused(autojump_clock: MockClock) -> None:
    async with line() as setup, trio.open_nursery() as nursery:
        setup.builder.going = trio.Event()
        nursery.start_soon(setup.engine.reload)
        await wait_all_tasks_blocked()
        with pytest.raises(Conflict, match="another reload is under way"):
            await setup.engine.reload()
        setup.builder.going.set()


async def test_what_was_built_while_the_engine_began_to_drain_is_not_installed(autojump_clock: MockClock) -> None:
    async with line() as setup, trio.open_nursery() as nursery:
        setup.builder.going = trio.Event()

        async def reload() -> None:
            with pytest.raises(Unavailable, match="draining"):
                await setup.engine.reload()

        nursery.start_soon(reload)
        await wait_all_tasks_blocked()
        await setup.engine.drain(10)
        setup.builder.going.set()
    assert setup.engine._stack.revision == 0


async def test_a_line_of_ready_parts_says_that_it_cannot(autojump_clock: MockClock) -> None:
    engine = Engine(Settings(), parts=make_parts())
    with pytest.raises(Unavailable, match="loading"):
        await engine.reload()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await engine.ready.wait()
        with pytest.raises(Conflict, match="made of ready parts"):
            await engine.reload()
        await engine.drain(1)
