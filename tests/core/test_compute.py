from __future__ import annotations

import random
import threading
import time
from array import array
from functools import partial

import msgspec
import pytest
import torch
import trio
from trio.testing import MockClock

from headrace.core.compute import MODEL, Activity, Compute, Courtesy, Handle, Runner, Sampling, watch
from headrace.core.kernels import Batch, Flat, as_tensors
from headrace.core.sampling import SamplingState
from headrace.hooks.messages import UNKNOWN_TOKEN, Admit, Step, StepResult
from headrace.hooks.params import SamplingParams
from tests.fakes import bound

EMPTY = array("i")


def step(index: int, **fields: object) -> Step:
    whole: dict[str, object] = {
        "index": index,
        "slot_ops": (),
        "block_copies": EMPTY,
        "tokens": EMPTY,
        "positions": EMPTY,
        "slots": EMPTY,
        "seq_lens": EMPTY,
        "cu_tokens": array("i", [0]),
        "cu_blocks": array("i", [0]),
        "block_tables": EMPTY,
        "sample_rows": EMPTY,
        "sample_slots": EMPTY,
        "sample_positions": EMPTY,
        "sample_drafts": EMPTY,
        "num_decodes": 0,
        "rows": (),
    }
    return Step(**{**whole, **fields})  # type: ignore[arg-type]


def result_of(index: int) -> StepResult:
    return StepResult(token_ids=[index], logprobs={}, errors={}, forward_s=0.0, sample_s=0.0)


async def test_steps_run_in_step_order_under_a_thousand_random_task_orders() -> None:
    num_steps = 6
    for seed in range(1000):
        rng, ran = random.Random(seed), list[int]()
        results: dict[int, list[int]] = {}

        def run(step: Step, ran: list[int] = ran) -> StepResult:
            ran.append(step.index)
            return result_of(step.index)

        with Compute(run) as compute:

            async def submit(
                index: int,
                turns: int,
                compute: Compute = compute,
                results: dict[int, list[int]] = results,
            ) -> None:
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                results[index] = (await compute.submit(step(index)).result()).token_ids

            async with trio.open_nursery() as nursery:
                for index in rng.sample(range(num_steps), num_steps):
                    nursery.start_soon(submit, index, rng.randrange(5))
        assert ran == list(range(num_steps))
        assert results == {index: [index] for index in range(num_steps)}


async def test_what_a_step_raises_comes_out_of_its_handle_and_the_next_step_runs() -> None:
    def run(step: Step) -> StepResult:
        if step.index == 0:
            raise ValueError("bad step")
        return result_of(step.index)

    with Compute(run) as compute:
        first, second = compute.submit(step(0)), compute.submit(step(1))
        with pytest.raises(ValueError, match="bad step"):
            await first.result()
        assert (await second.result()).token_ids == [1]


async def test_the_compute_threads_are_told_when_the_loop_is_at_work() -> None:
    told: list[bool] = []

    def run(step: Step) -> StepResult:
        time.sleep(0.02)
        told_while_running.append(told[-1])
        return result_of(step.index)

    told_while_running: list[bool] = []
    with Compute(run, give_way=told.append) as compute:
        for index in range(3):
            await compute.submit(step(index)).result()
            assert told[-1]  # This is the loop at work.
    assert told_while_running == [False] * 3
    assert not told[-1]


def test_the_compute_threads_are_told_of_a_change_and_not_of_each_turn_of_the_loop() -> None:
    told: list[bool] = []
    courtesy = Courtesy(told.append)
    for timeout in (1.0, 0.0, 0.0, 1.0):
        courtesy.before_io_wait(timeout)
        courtesy.after_io_wait(timeout)
    courtesy.soon()
    assert told == [False, True, False, True, True]


async def test_a_wait_that_is_cancelled_leaves_the_step_running() -> None:
    going, done = threading.Event(), []

    def run(step: Step) -> StepResult:
        going.wait(5)
        done.append(step.index)
        return result_of(step.index)

    with Compute(run) as compute:
        handle = compute.submit(step(0))
        with trio.move_on_after(0):
            await handle.result()
        going.set()
        assert (await handle.result()).token_ids == [0]
    assert done == [0]


async def test_a_thread_that_never_returns_does_not_hold_up_the_end() -> None:
    stuck = threading.Event()

    def run(step: Step) -> StepResult:
        stuck.wait(30)
        return result_of(step.index)

    with trio.fail_after(5):
        with Compute(run) as compute:
            handle: Handle = compute.submit(step(0))
            await trio.lowlevel.checkpoint()
    assert handle is not None
    stuck.set()


async def test_the_watchdog_gives_up_on_a_plugin_and_names_it() -> None:
    activity = Activity()
    activity.enter("logits processor loop of plugin acme")
    with pytest.raises(TimeoutError, match="plugin acme has kept the compute thread"), trio.fail_after(5):
        await watch(activity, warn_s=0.04, stall_s=0.1, forward_stall_s=100)


async def test_the_models_own_step_may_take_longer_than_a_plugin() -> None:
    activity = Activity()
    activity.enter()
    assert activity.who == MODEL
    with trio.move_on_after(0.3) as scope:
        await watch(activity, warn_s=0.04, stall_s=0.1, forward_stall_s=100)
    assert scope.cancelled_caught


async def test_time_for_which_the_whole_process_stood_still_is_nobodys() -> None:
    activity = Activity()
    activity.enter("a plugin")
    with trio.move_on_after(0.9) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(watch, activity, warn_s=0.2, stall_s=0.6, forward_stall_s=1))
            await trio.testing.wait_all_tasks_blocked()
            threading.Event().wait(0.7)  # As SIGSTOP does, this stops the loop too.
    assert scope.cancelled_caught


async def test_an_idle_thread_is_not_stuck(autojump_clock: MockClock) -> None:
    activity = Activity()
    activity.enter("something")
    activity.leave()
    with trio.move_on_after(1) as scope:
        await watch(activity, warn_s=0.01, stall_s=0.02, forward_stall_s=0.02)
    assert scope.cancelled_caught


class Echo:
    """A model whose logits say which token stood in each sampled row."""

    vocab_size = 10

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.copies: list[tuple[int, int]] = []

    def forward_flat(self, flat: Flat) -> torch.Tensor:
        batch = as_tensors(flat)
        self.batches.append(batch)
        logits = torch.zeros(len(batch.sample_rows), self.vocab_size)
        next_ids = (batch.token_ids[batch.sample_rows] + 1) % self.vocab_size
        return logits.scatter_(1, next_ids[:, None], 1.0)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.copies += pairs


def runner(model: Echo) -> Runner:
    sampling = SamplingState(num_slots=4, vocab_size=10, chain=(), sampler=bound("none", object()))
    return Runner(model, sampling, block_size=4, activity=Activity())


def admit(slot: int, prompt: list[int]) -> Admit:
    return Admit(
        slot=slot,
        choice=0,
        params=SamplingParams(temperature=0),
        chain=(),
        end_ids=frozenset(),
        prompt_ids=array("i", prompt),
        output_ids=array("i"),
    )


def test_a_token_that_only_the_thread_knows_is_filled_in_from_the_slot() -> None:
    model = Echo()
    run = runner(model)
    prefill = step(
        0,
        slot_ops=(admit(2, [5, 6]),),
        tokens=array("i", [5, 6]),
        positions=array("i", [0, 1]),
        slots=array("i", [2]),
        seq_lens=array("i", [2]),
        cu_tokens=array("i", [0, 2]),
        cu_blocks=array("i", [0, 1]),
        block_tables=array("i", [3]),
        sample_rows=array("i", [1]),
        sample_slots=array("i", [2]),
        sample_positions=array("i", [0]),
    )
    decode = step(
        1,
        tokens=array("i", [UNKNOWN_TOKEN]),
        positions=array("i", [2]),
        slots=array("i", [2]),
        seq_lens=array("i", [3]),
        cu_tokens=array("i", [0, 1]),
        cu_blocks=array("i", [0, 1]),
        block_tables=array("i", [3]),
        sample_rows=array("i", [0]),
        sample_slots=array("i", [2]),
        sample_positions=array("i", [1]),
        num_decodes=1,
        block_copies=array("i", [3, 7, 1, 2]),
    )
    assert run(prefill).token_ids == [7]
    assert run(decode).token_ids == [8]
    assert model.batches[1].token_ids.tolist() == [7]
    assert model.batches[1].block_tables[0].tolist() == [3]
    assert model.copies == [(3, 7), (1, 2)]


def test_a_step_planned_for_a_row_that_failed_runs_and_harms_nobody() -> None:
    model = Echo()
    run = runner(model)
    planned_ahead = step(
        0,
        slot_ops=(admit(0, [5]),),
        tokens=array("i", [UNKNOWN_TOKEN]),
        positions=array("i", [1]),
        slots=array("i", [0]),
        seq_lens=array("i", [2]),
        cu_tokens=array("i", [0, 1]),
        cu_blocks=array("i", [0, 1]),
        block_tables=array("i", [1]),
        sample_rows=array("i", [0]),
        sample_slots=array("i", [0]),
        sample_positions=array("i", [1]),
        num_decodes=1,
    )
    run(planned_ahead)
    assert model.batches[0].token_ids.tolist() == [0]


def test_the_models_step_is_not_blamed_on_a_processor_that_was_asked_to_admit() -> None:
    activity, seen = Activity(), list[str]()

    class Watched(Echo):
        def forward_flat(self, flat: Flat) -> torch.Tensor:
            seen.append(activity.who)
            return super().forward_flat(flat)

    class Idle:
        phase = "truncate"

        def admit(self, slot: int, params: object, admitted: Admit) -> bool:
            return False

        def apply(self, logits: torch.Tensor, rows: object) -> torch.Tensor:
            return logits

    sampling = SamplingState(
        num_slots=4,
        vocab_size=10,
        chain=[[bound("idle", Idle())]],
        sampler=bound("none", object()),
        on_call=activity.enter,
    )
    run = Runner(Watched(), sampling, block_size=4, activity=activity)
    run(
        step(
            0,
            slot_ops=(msgspec.structs.replace(admit(0, [5]), chain=(None,)),),
            tokens=array("i", [5]),
            positions=array("i", [0]),
            slots=array("i", [0]),
            seq_lens=array("i", [1]),
            cu_tokens=array("i", [0, 1]),
            cu_blocks=array("i", [0, 1]),
            block_tables=array("i", [1]),
            sample_rows=array("i", [0]),
            sample_slots=array("i", [0]),
            sample_positions=array("i", [0]),
            sample_drafts=array("i", [-1]),
        )
    )
    assert seen == [MODEL]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_sampling_on_a_thread_of_an_executor_s_own_leaves_the_activity_as_it_was(busy: bool) -> None:
    activity = Activity("executor x of plugin y")

    class Told:
        phase = "bias"

        def admit(self, slot: int, params: object, admitted: Admit) -> bool:
            return True

        def apply(self, logits: torch.Tensor, rows: object) -> torch.Tensor:
            assert activity.who == "logits processor told of plugin fake"
            return logits

    state = SamplingState(
        num_slots=4,
        vocab_size=10,
        chain=[[bound("told", Told())]],
        sampler=bound("none", object()),
        on_call=activity.enter,
    )
    sampling = Sampling(state, activity)
    if busy:
        activity.enter()
    only = step(
        0,
        slot_ops=(msgspec.structs.replace(admit(0, [5]), chain=(object(),)),),
        sample_rows=array("i", [0]),
        sample_slots=array("i", [0]),
        sample_positions=array("i", [0]),
        sample_drafts=array("i", [-1]),
    )
    sampling.begin(only)
    assert (activity.since is not None) == busy
    assert sampling.draw(only, torch.eye(10)[[3]], forward_s=0.5).token_ids == [3]
    assert (activity.since is not None) == busy
    if busy:
        assert activity.who == "executor x of plugin y"
