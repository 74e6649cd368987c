"""How faithful a setting of this engine is: KL divergence from float32 over the texts, and how often both agree.

`python -m benchmarks.quality.kl --set model.quantizer=int4 --set model.attention=native` compares that setting with the
reference (torch, quantizer `none`, attention `sdpa`) on the same checkpoint, prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from headrace.core.kernels import Model

from . import contexts as c
from .divergence import Divergence, Summary
from .report import RESULTS, table, write

REFERENCE = ("model.kernels=reference", "model.quantizer=none", "model.attention=sdpa")
"""Settings under which torch runs the Program in float32."""

Logits = Callable[[Sequence[int]], Tensor]


def compare(reference: Logits, other: Logits, texts: Mapping[str, list[list[int]]]) -> dict[str, Summary]:
    """Run both over the contexts of every text, one context at a time; no logits are kept."""
    found = {}
    for name, text in texts.items():
        divergence, start = Divergence(), perf_counter()
        for token_ids in text:
            divergence.add(reference(token_ids), other(token_ids))
        found[name] = divergence.summary()
        print(f"{name}: {len(text)} contexts in {perf_counter() - start:.0f} s", flush=True)
    return found


def load(*sets: str) -> tuple[Model, Logits]:
    """A model of its own with those settings, and what it says of a context."""
    chosen = c.settings(*sets)
    with c.opened(chosen) as found:
        model = c.load_model(found, chosen)
    return model, lambda token_ids: c.logits(model, token_ids, chosen.line.block_size)


def read_texts(names: Sequence[str], most: int | None, *sets: str) -> dict[str, list[list[int]]]:
    """The contexts of each text under *names*, at most *most* of each, in the tokens of the model of *sets*."""
    chosen = c.settings(*sets)
    with c.opened(chosen) as found:
        tokens = c.tokenizer(found, chosen)
    return {name: c.contexts((c.TEXTS / f"{name}.txt").read_text("utf-8"), tokens, most) for name in names}


def arguments(description: str) -> argparse.ArgumentParser:
    """What all measurements over the texts take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--text", action="append", help="such as english-2; may be repeated (the shorter three)")
    parser.add_argument("--contexts", type=int, metavar="N", help="the first N contexts of each text (all)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (all cores)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where the JSON goes (in {RESULTS.name}/)")
    return parser


def main() -> None:
    """The command line."""
    parser = arguments("KL divergence of a setting of this engine from float32.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `headrace serve --set`")
    parser.add_argument("--name", default="engine", help="what to call the setting in the table and the file")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    texts = read_texts(given.text or c.NAMES, given.contexts, *given.set)
    _, reference = load(*given.set, *REFERENCE)
    _, other = load(*given.set)
    found = {given.name: compare(reference, other, texts)}
    write(given.out or RESULTS / f"quality-{given.name}.json", found, settings=given.set)
    print(table(found))


if __name__ == "__main__":
    main()
