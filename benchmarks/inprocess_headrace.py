"""Headrace's steps without its line: the executor gets steps as the scheduler would write them, two in flight.

    python -m benchmarks.inprocess_headrace MODEL --set model.quantizer=int8

The last line is JSON: tokens a second of prefill and decode, and the share of a decode step outside forward and draw.
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from time import perf_counter

import trio

from headrace.core.build import build
from headrace.core.parts import Parts, quiet
from headrace.hooks import config
from headrace.hooks.messages import UNKNOWN_TOKEN, Admit, Release, Step, StepResult
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Executor

PROMPT = OUTPUT = 128
"""So that a sequence has 192 tokens behind it on average."""
LONG = 512
"""Tokens of the prefill that is timed, and of any one step."""


class Bench:
    """Writes steps for sequences 0, 1 …, each with the slot of its number and blocks of its own."""

    def __init__(self, parts: Parts, executor: Executor) -> None:
        self._executor = executor
        self._block_size = parts.pool.block_size
        self._params = SamplingParams(temperature=0.0, seed=0)
        self._chain = parts.stack.resolve(self._params, {})
        self._vocab_size = parts.info.vocab_size
        self._random = random.Random(0)
        self._blocks_each = -(-LONG // self._block_size)
        self._index = 0
        self._held: set[int] = set()
        self._num_slots = min(parts.pool.num_blocks // self._blocks_each, parts.limits.num_slots)

    async def prefill(self, num_tokens: int) -> float:
        """Seconds that a prompt takes to its first token."""
        started = perf_counter()
        await self._executor.submit(self._prompts([0], num_tokens)).result()
        return perf_counter() - started

    async def decode(self, num_seqs: int) -> tuple[float, list[StepResult]]:
        """Seconds of all decode steps of so many sequences, and what the executor said of each."""
        if num_seqs > self._num_slots:
            raise SystemExit(
                f"{num_seqs} sequences need room for as many of {LONG} tokens, found {self._num_slots}; "
                "give more of line.kv_blocks, line.max_running"
            )
        a_step = LONG // PROMPT
        for first in range(0, num_seqs, a_step):
            slots = range(first, min(first + a_step, num_seqs))
            await self._executor.submit(self._prompts(slots, PROMPT)).result()
        started, results = perf_counter(), []
        handles = [self._executor.submit(self._next(num_seqs, 1))]
        for drawn in range(2, OUTPUT):
            handles.append(self._executor.submit(self._next(num_seqs, drawn)))
            results.append(await handles.pop(0).result())
        results.append(await handles.pop(0).result())
        return perf_counter() - started, results

    def _prompts(self, slots: Sequence[int], length: int) -> Step:
        """Whole prompts of random tokens; a token is drawn for each. Slots that are still held change hands."""
        prompts = [array("i", self._random.choices(range(1000, self._vocab_size), k=length)) for _ in slots]
        admits = tuple(
            Admit(
                slot=slot,
                choice=0,
                params=self._params,
                chain=self._chain,
                end_ids=frozenset(),
                prompt_ids=prompt,
                output_ids=array("i"),
            )
            for slot, prompt in zip(slots, prompts, strict=True)
        )
        held = tuple(Release(slot=slot) for slot in slots if slot in self._held)
        self._held.update(slots)
        return self._step(slots, prompts, 0, 0, slot_ops=(*held, *admits))

    def _next(self, num_seqs: int, num_drawn: int) -> Step:
        unknown = array("i", [UNKNOWN_TOKEN])
        return self._step(range(num_seqs), [unknown] * num_seqs, PROMPT + num_drawn - 1, num_drawn)

    def _step(
        self,
        slots: Sequence[int],
        tokens: list[array[int]],
        start: int,
        num_drawn: int,
        slot_ops: tuple[Admit | Release, ...] = (),
    ) -> Step:
        lengths = [start + len(ids) for ids in tokens]
        cu_tokens = [0, *accumulate(len(ids) for ids in tokens)]
        num_blocks = [-(-length // self._block_size) for length in lengths]
        tables = [self._first_block(slot) + i for slot, n in zip(slots, num_blocks, strict=True) for i in range(n)]
        step = Step(
            index=self._index,
            slot_ops=slot_ops,
            block_copies=array("i"),
            tokens=array("i", [token for ids in tokens for token in ids]),
            positions=array("i", [start + i for ids in tokens for i in range(len(ids))]),
            slots=array("i", slots),
            seq_lens=array("i", lengths),
            cu_tokens=array("i", cu_tokens),
            cu_blocks=array("i", [0, *accumulate(num_blocks)]),
            block_tables=array("i", tables),
            sample_rows=array("i", [end - 1 for end in cu_tokens[1:]]),
            sample_slots=array("i", slots),
            sample_positions=array("i", [num_drawn] * len(slots)),
            sample_drafts=array("i", [-1] * len(slots)),
            num_decodes=sum(len(ids) == 1 for ids in tokens),
            rows=(),
        )
        self._index += 1
        return step

    def _first_block(self, slot: int) -> int:
        # Block 0 is the null block.
        return 1 + slot * self._blocks_each


async def measure(parts: Parts, batches: Sequence[int], repeats: int) -> dict[str, float]:
    """The figures of `metrics`, and what lies beside them."""
    figures: dict[str, float] = {}
    with parts.executor as executor:
        bench = Bench(parts, executor)
        await bench.prefill(PROMPT)
        figures["prefill_512"] = LONG / median([await bench.prefill(LONG) for _ in range(repeats)])
        for num_seqs in batches:
            seconds, results = await bench.decode(num_seqs)
            inside = sum(result.forward_s + result.sample_s for result in results)
            figures[f"decode_{num_seqs}"] = num_seqs * len(results) / seconds
            figures[f"outside_share_{num_seqs}"] = 1 - inside / seconds
            figures[f"sample_share_{num_seqs}"] = sum(result.sample_s for result in results) / seconds
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    loaded = config.load(file=None, environ={}, flags={"model.uri": args.model}, sets=tuple(args.sets))
    parts = build(loaded.settings, quiet)
    print(json.dumps(trio.run(measure, parts, args.batches, args.repeats)))


if __name__ == "__main__":
    main()
