"""What three logits processors and a sampler cost a step beyond their arithmetic: `python -m benchmarks.plugin_cost`.

A step is drawn with them and without any, and their arithmetic is called bare on the same rows. What the difference has
beyond that arithmetic is what the engine adds: choosing rows, timing, blame, checks. Shown apart are the look for rows
without a usable logit, a pass over the logits for each processor, and the copies that a stranger is lent.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable
from time import perf_counter

import torch

from headrace.core.chain import unusable
from headrace.core.generation import argmax
from headrace.core.sampling import SamplingState
from headrace.core.uniform import uniforms
from headrace.hooks.components import Bound
from headrace.hooks.messages import Admit
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Rows
from headrace.hooks.stack import NoParams

BUDGET_US = 50


class Scale:
    """A logits processor with hardly any arithmetic of its own."""

    phase = "bias"

    def admit(self, slot: int, params: object, admitted: Admit) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        return logits.mul_(0.999)


class First:
    """A sampler without arithmetic of its own."""

    def sample(self, logits: torch.Tensor, numbers: torch.Tensor, rows: Rows) -> torch.Tensor:
        return (numbers * 10).long()


def state(batch: int, vocab_size: int, distribution: str, *, num_processors: int = 3) -> SamplingState:
    """Sequences that use all processors and are drawn; without processors they are greedy."""

    def bound(name: str, component: object) -> Bound:
        return Bound(name=name, plugin="bench", component=component, distribution=distribution)

    made = SamplingState(
        num_slots=batch,
        vocab_size=vocab_size,
        chain=[[bound(f"scale-{i}", Scale()) for i in range(num_processors)]],
        sampler=bound("first", First()),
    )
    empty = array("i", [1])
    made.apply_ops(
        tuple(
            Admit(
                slot=slot,
                choice=0,
                params=SamplingParams(temperature=min(num_processors, 1), seed=slot),
                chain=(NoParams(),) * num_processors,
                end_ids=frozenset(),
                prompt_ids=empty,
                output_ids=empty[:0],
            )
            for slot in range(batch)
        )
    )
    return made


def bare(logits: torch.Tensor, batch: int) -> None:
    """The plugins' own arithmetic, and the numbers the sampler is given."""
    rows = Rows(list(range(batch)), [0] * batch, None)  # type: ignore[arg-type]
    for _ in range(3):
        Scale().apply(logits, rows)
    First().sample(logits, torch.from_numpy(uniforms(range(batch), [0] * batch, [0] * batch)), rows)


def times_us(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """A low quantile of each, taken in turns: what a busy machine adds is nobody's cost."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, run in runs.items():
                started = perf_counter()
                run()
                found[name].append(1e6 * (perf_counter() - started))
    return {name: sorted(each)[rounds // 20] for name, each in found.items()}


def measure(batch: int, vocab_size: int, rounds: int) -> None:
    logits, slots, positions = torch.randn(batch, vocab_size), list(range(batch)), [0] * batch
    none = state(batch, vocab_size, "headrace 0", num_processors=0)
    ours, theirs = (state(batch, vocab_size, name) for name in ("headrace 0", "acme 0"))
    runs: dict[str, Callable[[], object]] = {
        "without": lambda: none.draw(logits, slots, positions),
        "argmax": lambda: argmax(logits),
        "arithmetic": lambda: bare(logits, batch),
        "built in": lambda: ours.draw(logits, slots, positions),
        "stranger": lambda: theirs.draw(logits, slots, positions),
        "look": lambda: unusable(logits),
    }
    took = times_us(runs, rounds)
    added = took["built in"] - (took["without"] - took["argmax"]) - took["arithmetic"] - 3 * took["look"]
    print(f"vocabulary {vocab_size}: " + ", ".join(f"{name} {us:.0f}" for name, us in took.items()))
    print(f"  beyond arithmetic and three looks at the logits: {added:.0f} (budget {BUDGET_US})")
    print(f"  a stranger's copies, three there and back and one there: {took['stranger'] - took['built in']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--vocab", type=int, nargs="+", default=[64, 49152])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"batch {options.batch}, {options.threads} thread(s), {options.rounds} rounds, µs a step")
    for vocab_size in options.vocab:
        measure(options.batch, vocab_size, options.rounds)


if __name__ == "__main__":
    main()
