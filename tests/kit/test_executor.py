"""The contract of executors: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest
import torch
import trio

import headrace.plugins.thread
from headrace.core.compute import Activity, Compute, Runner
from headrace.core.sampling import SamplingState
from headrace.hooks.components import Bound
from headrace.hooks.messages import Admit, StepResult
from headrace.hooks.testing.catalog import contract
from headrace.hooks.testing.contract import run
from headrace.plugins.categorical import Categorical
from tests.kit.faults import contract_of, failures, plugin_of
from tests.kit.test_architecture import tiny_model


class Handle:
    def __init__(self, run):
        self.run = run
        self.value = None

    async def result(self):
        await trio.lowlevel.checkpoint()
        if self.value is None:
            self.value = self.run()
        return self.value


class Good:
    """The next token is a sum over all tokens before it, weighted by their places."""

    def __init__(self):
        self.tokens = {}
        self.handle_of = lambda result: Handle(lambda: result)

    def submit(self, step):
        return self.handle_of(self.run(step))

    def run(self, step):
        for op in step.slot_ops:
            if isinstance(op, Admit):
                self.admit(op)
            else:
                self.release(op)
        return StepResult(token_ids=self.ids(step), logprobs={}, errors={}, forward_s=0.0, sample_s=0.0)

    def admit(self, op):
        self.tokens[op.slot] = [*op.prompt_ids, *op.output_ids]

    def release(self, op):
        self.tokens.pop(op.slot)

    def ids(self, step):
        return [self.draw(slot) for slot in step.sample_slots]

    def draw(self, slot):
        tokens = self.tokens[slot]
        tokens.append(sum(place * token_id for place, token_id in enumerate(tokens, 1)) % 32)
        return tokens[-1]


def faulty(**members):
    return type("Faulty", (Good,), members)


class Lazy(Good):
    """Runs a step when somebody waits for it."""

    def submit(self, step):
        return Handle(lambda: self.run(step))


class Forgets(Good):
    def submit(self, step):
        result = self.run(step)
        handle = Handle(lambda: result)

        async def once():
            given, handle.value = (
                handle.value or result,
                StepResult(token_ids=[], logprobs={}, errors={}, forward_s=0.0, sample_s=0.0),
            )
            await trio.lowlevel.checkpoint()
            return given

        handle.result = once
        return handle


class Appends(Good):
    def admit(self, op):
        self.tokens[op.slot] = [*self.tokens.get(op.slot, []), *op.prompt_ids, *op.output_ids]

    def release(self, op):
        pass


def by_row(self, step):
    return [(token_id + row) % 32 for row, token_id in enumerate(Good.ids(self, step))]


def prompt_only(self, op):
    self.tokens[op.slot] = list(op.prompt_ids)


FAULTS = [
    ("test_each_sample_gets_one_token_of_the_vocabulary", faulty(ids=lambda self, step: Good.ids(self, step)[:1])),
    ("test_each_sample_gets_one_token_of_the_vocabulary", faulty(draw=lambda self, slot: 32)),
    ("test_a_step_may_draw_nothing", faulty(ids=lambda self, step: Good.ids(self, step) or [0])),
    ("test_submit_does_not_wait", faulty(submit=lambda self, step: self.run(step))),
    ("test_steps_run_in_their_order_whoever_waits_first", Lazy),
    ("test_who_stops_waiting_stops_nothing", Forgets),
    ("test_a_sequence_is_the_same_alone_and_in_company", faulty(ids=by_row)),
    ("test_a_new_owner_of_a_slot_finds_nothing_of_the_last_one", Appends),
    ("test_a_preempted_sequence_goes_on_where_it_was", faulty(admit=prompt_only)),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("executor", Good)).values()) == {None}


def test_the_built_in_keeps_every_promise_with_a_stand_in_for_its_model():
    tried = type("TestThread", (contract("executor"),), {"plugin": headrace.plugins.thread})
    assert set(run(tried).values()) == {None}


def drawn(context, options):
    """One that runs on the line's own thread and draws with its sampling."""
    model, sampling = Good(), context.executor.sampling

    def run(step):
        tokens = sampling.begin(step)
        assert -1 not in tokens
        logits = torch.zeros(len(step.sample_rows), context.executor.vocab_size)
        for row, token_id in enumerate(model.run(step).token_ids):
            logits[row, token_id] = 1
        return sampling.draw(step, logits, forward_s=0.0)

    return context.executor.on_thread(run)


def test_one_that_draws_with_the_line_s_own_sampling_on_its_thread_keeps_every_promise():
    tried = type("TestDrawn", (contract("executor"),), {"plugin": plugin_of("executor", drawn), "name": "it"})
    assert set(run(tried).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("executor", component), [test])


def test_the_compute_thread_with_a_model_keeps_every_promise():
    torch.set_num_threads(1)

    def compute():
        model = tiny_model()
        sampler = Bound(name="categorical", plugin="ours", component=Categorical(None, None))
        sampling = SamplingState(num_slots=4, vocab_size=model.vocab_size, chain=(), sampler=sampler)
        return Compute(Runner(model, sampling, block_size=4, activity=Activity()), num_threads=1)

    tried = contract_of("executor", compute, block_size=4, num_blocks=33, vocab_size=40)
    assert failures(tried) == {}
