"""The contract of the slot `executor`: steps in their order, one result each, and sequences that do not mix."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import trio
from msgspec import Struct

from ..messages import UNKNOWN_TOKEN, Admit, Release, Step, StepResult
from ..params import SamplingParams
from ..protocols import Context, ExecutorContext, SamplingContext
from .contract import Broken, Contract, ensure, skip

PATIENCE_S = 60.0


class Part(Struct, frozen=True, kw_only=True):
    """What one step computes of a sequence: its tokens from *start* on. The last one's logits are drawn from.

    Attributes:
        slot: of the sequence; its blocks follow from it.
        tokens: prompt and answer so far; `UNKNOWN_TOKEN` for the one the step before drew.
        num_prompt: tokens of the prompt among them.
        admits: the sequence takes over its slot.
        samples: a token is drawn.
    """

    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    start: int = 0
    admits: bool = False
    samples: bool = True


class ExecutorContract(Contract):
    """Hands steps to the executor as `forward` does, and looks at what they come to. Everything is drawn greedily.

    The executor is built with `Context.executor` as the line would fill it in, without processors. One that
    `uses_model` gets a stand-in that counts. Override `context` where it needs a checkpoint, too.

    Attributes:
        vocab_size: token ids are taken from, and must lie, below it.
        block_size, num_blocks: of the KV cache that the steps use.
        num_slots: sequences at once.
        deterministic: equal sequences give equal tokens, alone or in company.
    """

    slot = "executor"
    vocab_size: ClassVar[int] = 32
    block_size: ClassVar[int] = 16
    num_blocks: ClassVar[int] = 16
    num_slots: ClassVar[int] = 4
    deterministic: ClassVar[bool] = True

    def context(self) -> Context:
        """Limits of these sizes, the line's sampling, and a compute thread."""
        from ...core.compute import Activity, Sampling
        from ...core.executor import Offer
        from ...core.sampling import SamplingState
        from ..choices import uses_model
        from ..components import Bound

        activity, own = Activity(), uses_model(self.entry())
        offer = Offer(self.entry(), activity, 1, (lambda: _Counting(self.vocab_size)) if own else None)
        sampler = Bound(name="none", plugin="contract", component=object())
        state = SamplingState(num_slots=self.num_slots, vocab_size=self.vocab_size, chain=(), sampler=sampler)
        return Context(
            block_size=self.block_size,
            sampling=SamplingContext(vocab_size=self.vocab_size, num_slots=self.num_slots),
            executor=ExecutorContext(
                num_slots=self.num_slots,
                vocab_size=self.vocab_size,
                max_running=self.num_slots,
                max_step_tokens=self.num_blocks * self.block_size,
                max_model_len=(self.num_blocks - 1) // self.num_slots * self.block_size,
                block_size=self.block_size,
                num_blocks=self.num_blocks - 1,
                on_thread=offer.on_thread,
                sampling=None if own else Sampling(state, activity),
                load=offer.load,
            ),
        )

    def prompts(self) -> list[tuple[int, ...]]:
        """Prompts of three sequences, all of another length."""
        return [tuple((7 * i + 3 * j + 1) % self.vocab_size for j in range(3 + 4 * i)) for i in range(3)]

    def in_line(self, function: Callable[[_Line], Awaitable[None]]) -> None:
        """Call *function* with a line in front of a fresh executor, on a loop of its own with the real clock."""

        async def main() -> None:
            with trio.move_on_after(PATIENCE_S), ExitStack() as stack:
                executor = self.build()
                if hasattr(executor, "__enter__"):
                    executor = stack.enter_context(executor)
                await function(_Line(self, executor))
                return
            raise Broken(f"an executor must come to an end with its steps, and after {PATIENCE_S:g} s it has not")

        trio.run(main)

    def test_each_sample_gets_one_token_of_the_vocabulary(self) -> None:
        async def call(line: _Line) -> None:
            parts = [line.first(slot, prompt) for slot, prompt in enumerate(self.prompts())]
            result = await line.submit(parts).result()
            ensure(isinstance(result, StepResult), f"result must give a StepResult, found {type(result).__name__}")
            ids = list(result.token_ids)
            ensure(len(ids) == len(parts), f"{len(parts)} samples must get as many tokens, found {ids}")
            inside = all(0 <= token_id < self.vocab_size for token_id in ids)
            ensure(
                inside and not result.errors, f"tokens must lie below {self.vocab_size}, found {ids} {result.errors}"
            )

        self.in_line(call)

    def test_a_step_may_draw_nothing(self) -> None:
        """It computes a part of a long prompt."""

        async def call(line: _Line) -> None:
            part = line.first(0, self.prompts()[2], samples=False)
            ids = list((await line.submit([part]).result()).token_ids)
            ensure(not ids, f"a step without samples must draw nothing, found {ids}")

        self.in_line(call)

    def test_submit_does_not_wait(self) -> None:
        """It gives a handle at once, from the loop, also while the step before runs."""

        async def call(line: _Line) -> None:
            handles = [line.submit([line.first(slot, self.prompts()[0])]) for slot in range(2)]
            for handle in handles:
                ensure(callable(getattr(handle, "result", None)), f"submit must return a handle, found {handle!r}")
                await handle.result()

        self.in_line(call)

    def test_steps_run_in_their_order_whoever_waits_first(self) -> None:
        """The second step continues with what the first has drawn; its result is asked for first."""
        self._need_determinism()

        async def call(line: _Line) -> None:
            prompt = self.prompts()[1]
            wanted = await line.answer(0, prompt, 3)
            line.release(0)
            handles = [line.submit([line.first(0, prompt)])]
            for number in range(1, 3):
                handles.append(line.submit([line.unknown(0, prompt, number)]))
            results = [list((await handle.result()).token_ids) for handle in reversed(handles)]
            found = [token_id for ids in reversed(results) for token_id in ids]
            ensure(found == wanted, f"steps must run in their order, to {wanted}, found {found}")

        self.in_line(call)

    def test_who_stops_waiting_stops_nothing(self) -> None:
        """Giving up the wait gives up neither the step nor its result."""

        async def call(line: _Line) -> None:
            handle = line.submit([line.first(0, self.prompts()[0])])
            with trio.CancelScope() as scope:
                scope.cancel()
                await handle.result()
                await trio.lowlevel.checkpoint()
            if scope.cancelled_caught:
                ids = list((await handle.result()).token_ids)
                ensure(len(ids) == 1, f"who stops waiting must not stop the step, it came to {ids}")

        self.in_line(call)

    def test_a_sequence_is_the_same_alone_and_in_company(self) -> None:
        self._need_determinism()

        async def call(line: _Line) -> None:
            alone = []
            for prompt in self.prompts():
                alone.append(await line.answer(0, prompt, 4))
                line.release(0)
            slots = list(enumerate(self.prompts()))
            answers: list[list[int]] = [[] for _ in slots]
            for number in range(4):
                parts = [
                    line.next(slot, prompt, answers[slot]) if number else line.first(slot, prompt)
                    for slot, prompt in slots
                ]
                # One after the other, in another order each time: rows are not slots.
                parts = parts[number % 3 :] + parts[: number % 3]
                ids = (await line.submit(parts).result()).token_ids
                for part, token_id in zip(parts, ids, strict=True):
                    answers[part.slot].append(token_id)
            ensure(answers == alone, f"sequences in company must come to {alone}, as alone, found {answers}")

        self.in_line(call)

    def test_a_new_owner_of_a_slot_finds_nothing_of_the_last_one(self) -> None:
        self._need_determinism()

        async def call(line: _Line) -> None:
            first, second = self.prompts()[:2]
            wanted = await line.answer(1, second, 3)
            await line.answer(0, first, 3)
            line.release(0)
            found = await line.answer(0, second, 3)
            ensure(found == wanted, f"a slot's new owner must come to {wanted}, found {found}")

        self.in_line(call)

    def test_a_preempted_sequence_goes_on_where_it_was(self) -> None:
        """Its blocks were lost: prompt and answer so far are computed anew, and it is admitted with both."""
        self._need_determinism()

        async def call(line: _Line) -> None:
            prompt = self.prompts()[1]
            wanted = await line.answer(0, prompt, 4)
            line.release(0)
            again = Part(slot=2, tokens=(*prompt, *wanted[:2]), num_prompt=len(prompt), admits=True)
            found = list((await line.submit([again]).result()).token_ids)
            ensure(found == wanted[2:3], f"the token after {wanted[:2]} must be {wanted[2]} again, found {found}")

        self.in_line(call)

    def _need_determinism(self) -> None:
        if not self.deterministic:
            skip("deterministic = False")


class _Counting:
    """In place of Headrace's own model: the next token is a sum over all before it, weighted by their places."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: dict[int, list[int]] = {}

    def __call__(self, step: Step) -> StepResult:
        for op in step.slot_ops:
            if isinstance(op, Admit):
                self._tokens[op.slot] = [*op.prompt_ids, *op.output_ids]
            elif isinstance(op, Release):
                self._tokens.pop(op.slot)
        token_ids = [self._draw(self._tokens[slot]) for slot in step.sample_slots]
        return StepResult(token_ids=token_ids, logprobs={}, errors={}, forward_s=0.0, sample_s=0.0)

    def _draw(self, tokens: list[int]) -> int:
        tokens.append(sum(place * token_id for place, token_id in enumerate(tokens, 1)) % self._vocab_size)
        return tokens[-1]


class _Line:
    """Makes steps of parts, and numbers them."""

    def __init__(self, contract: ExecutorContract, executor: Any) -> None:
        self._contract = contract
        self._executor = executor
        self._index = 0
        self._releases: list[int] = []
        # One block is the null block; the others are shared out by slot.
        self._blocks = (contract.num_blocks - 1) // contract.num_slots

    def first(self, slot: int, prompt: tuple[int, ...], *, samples: bool = True) -> Part:
        """The whole prompt of a new sequence."""
        return Part(slot=slot, tokens=prompt, num_prompt=len(prompt), admits=True, samples=samples)

    def next(self, slot: int, prompt: tuple[int, ...], answer: Sequence[int]) -> Part:
        """The last token of an *answer*."""
        tokens = (*prompt, *answer)
        return Part(slot=slot, tokens=tokens, num_prompt=len(prompt), start=len(tokens) - 1)

    def unknown(self, slot: int, prompt: tuple[int, ...], number: int) -> Part:
        """Token *number* of an answer, which only the executor knows yet."""
        return self.next(slot, prompt, [UNKNOWN_TOKEN] * number)

    async def answer(self, slot: int, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """What *prompt* is answered with, one token a step."""
        answer: list[int] = []
        for number in range(num_tokens):
            part = self.next(slot, prompt, answer) if number else self.first(slot, prompt)
            ids = (await self.submit([part]).result()).token_ids
            ensure(len(ids) == 1, f"one sample must get one token, found {ids}")
            answer += ids
        return answer

    def release(self, slot: int) -> None:
        """The owner of *slot* has ended: the next step says so."""
        self._releases.append(slot)

    def submit(self, parts: Sequence[Part]) -> Any:
        """A step of these *parts*; decodes come first."""
        handle = self._executor.submit(self._step(parts, self._releases))
        self._releases = []
        self._index += 1
        return handle

    def _step(self, parts: Sequence[Part], releases: Sequence[int]) -> Step:
        step: dict[str, array[int]] = {
            name: array("i")
            for name in ("tokens", "positions", "slots", "seq_lens", "block_tables", "sample_rows", "sample_slots")
        }
        step |= {"cu_tokens": array("i", [0]), "cu_blocks": array("i", [0]), "sample_positions": array("i")}
        for part in parts:
            step["tokens"].extend(part.tokens[part.start :])
            step["positions"].extend(range(part.start, len(part.tokens)))
            step["cu_tokens"].append(len(step["tokens"]))
            step["slots"].append(part.slot)
            step["seq_lens"].append(len(part.tokens))
            count = -(-len(part.tokens) // self._contract.block_size)
            assert count <= self._blocks, "num_blocks is too small for the prompts"
            step["block_tables"].extend(range(1 + part.slot * self._blocks, 1 + part.slot * self._blocks + count))
            step["cu_blocks"].append(len(step["block_tables"]))
            if part.samples:
                step["sample_rows"].append(len(step["tokens"]) - 1)
                step["sample_slots"].append(part.slot)
                step["sample_positions"].append(len(part.tokens) - part.num_prompt)
        return Step(
            index=self._index,
            slot_ops=(*(Release(slot=slot) for slot in releases), *map(_admit, (p for p in parts if p.admits))),
            block_copies=array("i"),
            sample_drafts=array("i", [-1] * len(step["sample_rows"])),
            num_decodes=sum(len(part.tokens) - part.start == 1 for part in parts),
            rows=(),
            **step,
        )


def _admit(part: Part) -> Admit:
    return Admit(
        slot=part.slot,
        choice=0,
        params=SamplingParams(temperature=0.0, seed=0),
        chain=(),
        end_ids=frozenset(),
        prompt_ids=array("i", part.tokens[: part.num_prompt]),
        output_ids=array("i", part.tokens[part.num_prompt :]),
    )
