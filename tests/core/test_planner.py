"""The planner by itself: what goes into a step, and what comes back."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from headrace.core.batch.planner import Limits, Planner
from headrace.core.kv.blocks import BlockPool
from headrace.core.mailbox import Mailbox
from headrace.core.timeline import Timeline
from headrace.hooks.errors import ContextTooLong
from headrace.hooks.messages import FinishReason, Prompt, Request, Sampled, SampledRow, Step, TokenPrompt
from headrace.hooks.params import SamplingParams
from headrace.plugins.fcfs import FirstComeFirstServed
from tests.fakes import END_ID


class Desk:
    """A planner, and the requests that went through it."""

    def __init__(self, *, num_blocks: int = 100, block_size: int = 4, **limits: object) -> None:
        self.now = 0.0
        self.retired: list[Request] = []
        self.pool = BlockPool(num_blocks, block_size)
        settings = {"max_running": 8, "max_step_tokens": 32, "max_model_len": 200, "num_slots": 20, **limits}
        self.planner = Planner(
            pool=self.pool,
            policy=FirstComeFirstServed(),
            limits=Limits(**settings),  # type: ignore[arg-type]
            end_ids=frozenset({END_ID}),
            on_retired=self.retired.append,
            clock=lambda: self.now,
        )

    def ask(self, num_tokens: int = 5, *, first: int = 1, lookahead: bool = True, **params: object) -> Request:
        self.now += 1
        request = Request(
            id=f"r{self.now}",
            prompt=TokenPrompt(token_ids=()),
            params=SamplingParams(**params),  # type: ignore[arg-type]
            chain=(),
            mailbox=Mailbox(max_deltas=4, clock=lambda: self.now),
            timeline=Timeline(lambda: self.now),
            arrival=self.now,
            lookahead=lookahead,
        )
        self.planner.add(Prompt(request=request, token_ids=array("i", range(first, first + num_tokens))))
        return request

    def plan(self) -> Step:
        step = self.planner.plan()
        assert step is not None
        return step

    def complete(
        self, step: Step, finish: Callable[[int], FinishReason | None] = lambda i: None, *, forward_s: float = 0.01
    ) -> None:
        rows = tuple(
            SampledRow(row=row, token_id=7 if row.samples else -1, finish=finish(i)) for i, row in enumerate(step.rows)
        )
        self.planner.complete(Sampled(index=step.index, rows=rows, forward_s=forward_s, sample_s=0.0))


def test_a_long_prompt_is_computed_in_chunks_beside_a_running_stream() -> None:
    desk = Desk(max_step_tokens=16)
    desk.ask(4, max_tokens=50)
    desk.complete(desk.plan())
    desk.ask(40, first=100, max_tokens=5)
    sizes = []
    for _ in range(3):
        step = desk.plan()
        sizes.append([row.num_tokens for row in step.rows])
        desk.complete(step)
    assert sizes == [[1, 15], [1, 15], [1, 10]]
    assert step.rows[1].samples


def test_the_next_step_is_planned_before_the_last_ids_are_known() -> None:
    desk = Desk()
    desk.ask(4, max_tokens=50)
    first, second = desk.plan(), desk.plan()
    assert list(second.tokens) == [-1]
    assert list(second.positions) == [4]
    desk.complete(first)
    desk.complete(second)
    assert list(desk.plan().tokens) == [7]


def test_an_end_by_length_costs_no_row() -> None:
    desk = Desk()
    desk.ask(4, max_tokens=2)
    desk.plan()
    desk.plan()
    assert desk.planner.plan() is None


def test_a_sequence_without_lookahead_takes_part_in_every_other_step() -> None:
    desk = Desk()
    desk.ask(4, max_tokens=50, lookahead=False)
    first = desk.plan()
    assert desk.planner.plan() is None
    desk.complete(first)
    assert list(desk.plan().tokens) == [7]


def test_blocks_of_an_end_by_content_return_with_the_last_step_that_names_them() -> None:
    desk = Desk()
    request = desk.ask(4, max_tokens=50)
    first, second = desk.plan(), desk.plan()
    desk.complete(first, lambda i: FinishReason.STOP)
    assert desk.pool.num_used == 2
    assert desk.retired == []
    desk.complete(second)
    assert desk.pool.num_used == 0
    assert desk.retired == [request]
    assert desk.planner.counters["stale_rows"] == 1


def test_schedule_returns_the_blocks_of_a_cancelled_request_in_the_middle_of_a_prefill() -> None:
    desk = Desk(max_step_tokens=8)
    request = desk.ask(40, max_tokens=5)
    step = desk.plan()
    request.mailbox.close()
    desk.planner.look_at(request)
    assert desk.planner.plan() is None
    desk.complete(step)
    assert desk.pool.num_used == 0
    assert desk.retired == [request]


def test_a_slot_is_released_before_it_is_admitted_again() -> None:
    desk = Desk(num_slots=1, max_running=1)
    desk.ask(4, max_tokens=1)
    desk.ask(4, first=50, max_tokens=1)
    desk.complete(desk.plan(), lambda i: FinishReason.LENGTH)
    ops = desk.plan().slot_ops
    assert [type(op).__name__ for op in ops] == ["Release", "Admit"]
    assert {op.slot for op in ops} == {0}


def test_a_result_of_an_older_stay_in_the_cache_is_dropped() -> None:
    desk = Desk()
    desk.ask(4, max_tokens=50)
    step = desk.plan()
    step.rows[0].sequence.epoch += 1
    desk.complete(step)
    assert desk.planner.counters["stale_rows"] == 1
    assert desk.planner.counters["generated_tokens"] == 0


def test_a_preempted_sequence_keeps_its_slot_and_the_id_in_flight() -> None:
    desk = Desk(num_blocks=4, block_size=4, max_model_len=16)
    old = desk.ask(7, max_tokens=9)
    new = desk.ask(7, first=50, max_tokens=9)
    steps = [desk.plan()]
    for _ in range(12):
        if (step := desk.planner.plan()) is not None:
            steps.append(step)
        desk.complete(steps.pop(0), lambda i: None)
        if desk.planner.counters["preemptions"]:
            break
    assert desk.planner.counters["preemptions"] == 1
    assert new.timeline.state == "preempted"
    assert old.timeline.state == "decode"
    assert desk.planner.num_free_slots == 18


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    desk = Desk(num_blocks=4, block_size=4)
    request = desk.ask(16)
    delta = request.mailbox.receive_nowait()
    assert delta is not None
    assert isinstance(delta.error, ContextTooLong)
    assert "16 tokens, found 16 tokens of prompt" in str(delta.error)
    assert desk.retired == [request]


def test_a_step_beside_running_streams_keeps_to_its_time() -> None:
    desk = Desk(max_step_tokens=512, max_model_len=2000, num_blocks=2000, target_step_s=0.1)
    desk.ask(400, max_tokens=50)
    step = desk.plan()
    rows = tuple(SampledRow(row=row, token_id=7) for row in step.rows)
    # Four hundred tokens took two seconds: twenty of them take the tenth that a step may take.
    desk.planner.complete(Sampled(index=0, rows=rows, forward_s=2.0, sample_s=0.0))
    desk.ask(400, first=1000, max_tokens=5)
    assert [row.num_tokens for row in desk.plan().rows] == [1, 19]


def test_running_streams_pause_for_no_more_than_so_many_of_their_steps() -> None:
    desk = Desk(max_step_tokens=512, max_model_len=2000, num_blocks=2000, max_pause=5.0)
    desk.ask(400, max_tokens=50)
    # A token takes 10 ms, and a step of one decode 40, so 30 for itself. Five times 40 hold it and 17 tokens.
    for forward_s in (4.0, 0.04):
        rows = tuple(SampledRow(row=row, token_id=7) for row in desk.plan().rows)
        desk.planner.complete(Sampled(index=0, rows=rows, forward_s=forward_s, sample_s=0.0))
    desk.ask(400, first=1000, max_tokens=5)
    assert [row.num_tokens for row in desk.plan().rows] == [1, 16]


def test_streams_that_start_together_pause_longer_until_one_has_settled() -> None:
    desk = Desk(max_step_tokens=512, max_model_len=4000, num_blocks=4000, num_slots=9, max_pause=2.0, start_pause_s=1.0)
    desk.ask(100, max_tokens=50)
    desk.complete(desk.plan(), forward_s=1.0)  # 10 ms a token.
    for _ in range(14):
        desk.complete(desk.plan(), forward_s=0.2)  # So much for one decode.
    desk.ask(1000, first=1000, max_tokens=50)
    seen = []
    for _ in range(4):
        step = desk.plan()
        seen.append([row.num_tokens for row in step.rows])
        desk.complete(step, forward_s=0.2 + 0.01 * (len(step.tokens) - 1))
    # A second holds 80 tokens of a prompt beside a decode, twice its usual step holds 20.
    assert seen == [[1, 80], [1, 80], [1, 20], [1, 20]]


def test_the_budget_follows_the_machine_and_no_single_step() -> None:
    desk = Desk(max_step_tokens=512, max_model_len=4000, num_blocks=4000, target_step_s=0.2)
    desk.ask(400, max_tokens=200)
    sizes = []
    # 10 ms a token at first; one step is held up for 10 s; then a token takes 20 ms.
    for token_s, held_s in [(0.01, 0.0)] * 4 + [(0.01, 10.0)] + [(0.02, 0.0)] * 12:
        step = desk.plan()
        sizes.append(len(step.tokens))
        desk.complete(step, forward_s=held_s + token_s * len(step.tokens))
        if step.index == 0:
            desk.ask(3000, first=1000, max_tokens=5)
    assert sizes[1:5] == [20] * 4
    assert sizes[5] == 15  # A third of what is twice as slow, whatever ten seconds say.
    assert sizes[-1] == 10


def test_more_sequences_than_a_step_holds_all_get_their_turn() -> None:
    desk = Desk(max_running=2, num_slots=20)
    requests = [desk.ask(3, first=10 * i, max_tokens=100) for i in range(2)]
    desk.complete(desk.plan())
    for request in requests:  # Parked, so that two more may start.
        request.mailbox.parked = True
        desk.planner.look_at(request)
    for i in range(2, 4):
        desk.ask(3, first=10 * i, max_tokens=100)
    desk.complete(desk.plan())
    for request in requests:
        request.mailbox.parked = False
        desk.planner.look_at(request)
    seen = [{row.sequence.request.id for row in desk.plan().rows} for _ in range(2)]
    assert len(seen[0]) == len(seen[1]) == 2
    assert len(seen[0] | seen[1]) == 4
