"""How likely the tokens of a prompt were: which rows of which steps say so, and what the request is told."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from headrace.core.batch.planner import STEP_SCORES
from headrace.core.compute import Activity, Runner
from headrace.core.engine import Engine
from headrace.core.kernels import Flat, as_tensors
from headrace.core.kv.blocks import BlockPool
from headrace.core.sampling import SamplingState, token_scores
from headrace.hooks.messages import Admit, Request, Step, StepResult, TokenLogprobs, TokenPrompt
from headrace.hooks.params import SamplingParams
from tests.core.test_line import line
from tests.fakes import FakeExecutor, answer, bound, make_parts, text_of


class ScoringExecutor(FakeExecutor):
    """Says of each token of a prompt what came before it: the sum of its context is its log-probability."""

    contexts: dict[int, list[int]]

    def _write(self, step: Step) -> dict[int, list[int]]:
        self.contexts = super()._write(step)
        return self.contexts

    def run(self, step: Step) -> StepResult:
        result = super().run(step)
        scores = [
            TokenLogprobs(logprob=-float(sum(self.contexts[row])), top_ids=(token,) * top, top_logprobs=(-1.0,) * top)
            for row, token, top in zip(step.score_rows, step.score_tokens, step.score_tops, strict=True)
        ]
        return StepResult(
            token_ids=result.token_ids, logprobs={}, errors=result.errors, forward_s=0.01, sample_s=0.0, scores=scores
        )


async def ask(engine: Engine, prompt: list[int], **params: object) -> tuple[Request, str]:
    request = engine.request(TokenPrompt(token_ids=tuple(prompt)), {"seed": 0, "max_tokens": 3, **params})
    await engine.submit(request)
    text = ""
    while (delta := await engine.receive(request)) is not None:
        assert delta.error is None
        if not text:
            assert len(request.prompt_scores) == (len(prompt) - 1 if "prompt_logprobs" in params else 0)
        text += delta.text if delta.choice == 0 else ""
    engine.close(request)
    return request, text


def expected(prompt: list[int]) -> list[float]:
    return [-float(sum(prompt[:end])) for end in range(1, len(prompt))]


def logprobs(request: Request) -> list[float]:
    return [score.logprob for score in request.prompt_scores]


@pytest.mark.parametrize("length", [1, 2, 32, 33, 64, 65, 100])
async def test_each_token_but_the_first_is_scored_once_however_the_prompt_is_cut(
    autojump_clock: MockClock, length: int
) -> None:
    prompt = list(range(1, length + 1))
    async with line(make_parts(executor=ScoringExecutor)) as engine:
        request, text = await ask(engine, prompt, prompt_logprobs=2)
    assert logprobs(request) == expected(prompt)
    assert all(score.top_ids == (token,) * 2 for token, score in zip(prompt[1:], request.prompt_scores, strict=True))
    assert text == text_of(answer(prompt, 3))
    assert list(request.prompt_ids) == prompt


async def test_a_cached_prefix_is_computed_again_for_its_scores(autojump_clock: MockClock) -> None:
    prompt = list(range(1, 30))
    async with line(make_parts(executor=ScoringExecutor)) as engine:
        await ask(engine, prompt)
        request, text = await ask(engine, prompt, prompt_logprobs=0)
        again, _ = await ask(engine, prompt)
    assert (logprobs(request), text) == (expected(prompt), text_of(answer(prompt, 3)))
    assert (request.num_cached_tokens, again.num_cached_tokens) == (0, 28)


async def test_choices_share_the_scores_of_their_prompt(autojump_clock: MockClock) -> None:
    async with line(make_parts(executor=ScoringExecutor)) as engine:
        request, _ = await ask(engine, [4, 5, 6], prompt_logprobs=0, n=3)
    assert logprobs(request) == expected([4, 5, 6])


async def test_a_step_scores_no_more_rows_than_it_may(autojump_clock: MockClock) -> None:
    executors: list[ScoringExecutor] = []

    def build(pool: BlockPool) -> ScoringExecutor:
        executors.append(ScoringExecutor(pool))
        return executors[0]

    async with line(make_parts(executor=build, max_step_tokens=512)) as engine:
        await ask(engine, list(range(1, 181)), prompt_logprobs=0)
    sizes = [len(step.score_rows) for step in executors[0].steps if step.score_rows]
    assert max(sizes) == STEP_SCORES
    assert sum(sizes) == 179


async def test_ids_come_with_the_deltas_where_asked_for_and_not_otherwise(autojump_clock: MockClock) -> None:
    async with line(make_parts()) as engine:
        ids: dict[bool, list[int]] = {}
        for wanted in (True, False):
            request = engine.request(
                TokenPrompt(token_ids=(1, 2)), {"seed": 0, "max_tokens": 4, "return_token_ids": wanted}
            )
            await engine.submit(request)
            ids[wanted] = []
            while (delta := await engine.receive(request)) is not None:
                ids[wanted] += delta.token_ids
            engine.close(request)
    assert ids == {True: answer([1, 2], 4), False: []}


def test_scores_are_the_models_own_logarithms_and_ranks() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -math.inf], [0.0, 0.0, 5.0, 1.0]])
    first, second = token_scores(logits.clone(), [2, 3], [2, 0])
    shares = logits.softmax(-1).log()
    assert first.logprob == pytest.approx(shares[0, 2].item())
    assert (first.rank, first.top_ids) == (2, (1, 2))
    assert first.top_logprobs == pytest.approx(shares[0, [1, 2]].tolist())
    assert (second.rank, second.top_ids) == (2, ())
    assert second.logprob == pytest.approx(shares[1, 3].item())


def test_the_runner_draws_from_rows_that_draw_and_scores_the_others() -> None:
    class RowModel:
        """Token t is followed by t + 1."""

        vocab_size = 8

        def forward_flat(self, flat: Flat) -> Tensor:
            batch = as_tensors(flat)
            return torch.nn.functional.one_hot(batch.token_ids[batch.sample_rows] + 1, 8).float() * 50

        def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
            raise AssertionError("there is nothing to copy")

    sampling = SamplingState(num_slots=1, vocab_size=8, chain=[], sampler=bound("none", None))
    run = Runner(RowModel(), sampling, block_size=4, activity=Activity())
    prompt = array("i", [1, 2, 5])
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    admit = Admit(
        slot=0, choice=0, params=params, chain=(), end_ids=frozenset(), prompt_ids=prompt, output_ids=array("i")
    )
    result = run(
        Step(
            index=0,
            slot_ops=(admit,),
            block_copies=array("i"),
            tokens=prompt,
            positions=array("i", [0, 1, 2]),
            slots=array("i", [0]),
            seq_lens=array("i", [3]),
            cu_tokens=array("i", [0, 3]),
            cu_blocks=array("i", [0, 1]),
            block_tables=array("i", [1]),
            sample_rows=array("i", [2]),
            sample_slots=array("i", [0]),
            sample_positions=array("i", [0]),
            sample_drafts=array("i", [-1]),
            num_decodes=0,
            rows=(),
            score_rows=array("i", [0, 1]),
            score_tokens=array("i", [2, 5]),
            score_tops=array("i", [1, 1]),
        )
    )
    assert result.token_ids == [6]
    assert [(score.rank, score.top_ids) for score in result.scores] == [(1, (2,)), (2, (3,))]
    assert result.scores[0].logprob == pytest.approx(0.0, abs=1e-6)
    assert result.scores[1].logprob == pytest.approx(-50.0, abs=1e-3)


async def test_a_preempted_request_is_not_scored_again(autojump_clock: MockClock) -> None:
    prompts = [list(range(start, start + 10)) for start in (1, 101, 201)]
    asked: dict[int, Request] = {}

    async with line(make_parts(num_blocks=12, executor=ScoringExecutor)) as engine:

        async def run(place: int) -> None:
            asked[place], _ = await ask(engine, prompts[place], prompt_logprobs=0, max_tokens=20)

        async with trio.open_nursery() as nursery:
            for place in range(len(prompts)):
                nursery.start_soon(run, place)
        assert engine.statistics().preemptions_total > 0
    assert [logprobs(asked[place]) for place in range(3)] == [expected(prompt) for prompt in prompts]
