"""Steps of a model, timed one by one: how long each takes at a batch size, in which parts, and what the machine allows.

Knows no line and no requests: it makes steps of made-up tokens and gives them to the model. See `headrace bench step`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Final

import torch

from ..hooks.origins import no_origin
from ..hooks.program import Attend, Head, Linear, Program
from ..hooks.settings import Settings
from .kernels import Flat
from .kernels.native.model import NativeModel
from .kernels.reference import ReferenceModel
from .opened import WhereOf, load_model, open_model
from .parts import Progress
from .steptime import Limits, StepTime

FIRST_TOKEN: Final = 17
"""Ids from here on are taken one after another: which they are changes no time."""


def measure_steps(
    settings: Settings,
    progress: Progress,
    where: WhereOf = no_origin,
    *,
    batches: tuple[int, ...],
    prompts: tuple[int, ...],
    context: int,
    rounds: int,
) -> Iterator[Limits | StepTime]:
    """First the machine's limits, then a time for each of *batches* and *prompts*.

    Raises:
        StartError: what is wrong, for the operator.
    """
    opened = open_model(settings, progress, where)
    model = load_model(opened, settings, progress)
    opened.checkpoint.close()
    if isinstance(model, NativeModel):
        model.make_ready()
    limits = _limits(model)
    yield limits
    block_size, num_blocks = opened.memory.block_size, opened.memory.num_blocks
    steps = [("decode", size, _decode(size, context, block_size, num_blocks)) for size in batches]
    fitting = [size for size in prompts if size <= opened.max_model_len]
    steps += [("prefill", size, _prefill(size, block_size, num_blocks)) for size in fitting]
    with torch.inference_mode():
        for kind, size, flat in steps:
            yield _time(model, opened.program, kind, size, context if kind == "decode" else 0, flat, rounds, limits)


def _limits(model: ReferenceModel | NativeModel) -> Limits:
    if not isinstance(model, NativeModel):
        return Limits(kernels="reference")
    read, products = model.limits()
    return Limits(
        kernels=model.dialect,
        read_bytes_per_s=read,
        products_per_s=products,
        weight_bytes=model.weight_bytes,
        breaks=model.breaks,
    )


def _time(
    model: ReferenceModel | NativeModel,
    program: Program,
    kind: str,
    size: int,
    context: int,
    flat: Flat,
    rounds: int,
    limits: Limits,
) -> StepTime:
    model.forward_flat(flat)
    seconds = []
    for _ in range(rounds):
        started = perf_counter()
        model.forward_flat(flat)
        seconds.append(perf_counter() - started)
    return StepTime(
        kind=kind,
        size=size,
        context=context,
        best_s=min(seconds),
        median_s=median(seconds),
        limit_s=_limit(program, flat, limits, model.store.pool.element_size()),
        parts=model.profile(flat, max(2, rounds // 3)) if isinstance(model, NativeModel) else {},
    )


def _limit(program: Program, flat: Flat, limits: Limits, value_bytes: int) -> float | None:
    """Seconds that reading or multiplying takes, whichever is longer. value_bytes: of a key's or value's feature."""
    if limits.read_bytes_per_s is None or limits.products_per_s is None or limits.weight_bytes is None:
        return None
    num_layers = sum(isinstance(op, Attend) for op in program.ops)
    kv_bytes = 2 * value_bytes * num_layers * program.num_kv_heads * program.head_dim * sum(flat.seq_lens)
    products = 0
    for op in program.ops:
        if isinstance(op, Linear | Head):
            n, k = program.weights[op.weight].shape
            products += n * k * (len(flat.sample_rows) if isinstance(op, Head) else len(flat.token_ids))
    return max((limits.weight_bytes + kv_bytes) / limits.read_bytes_per_s, products / limits.products_per_s)


def _decode(num_seqs: int, context: int, block_size: int, num_blocks: int) -> Flat:
    """One token each, after *context* others."""
    blocks = context // block_size + 1
    return _flat([[FIRST_TOKEN + i] for i in range(num_seqs)], [context] * num_seqs, blocks, block_size, num_blocks)


def _prefill(num_tokens: int, block_size: int, num_blocks: int) -> Flat:
    """A whole prompt, of which the last token is sampled."""
    token_ids = [FIRST_TOKEN + i % 1000 for i in range(num_tokens)]
    return _flat([token_ids], [0], -(-num_tokens // block_size), block_size, num_blocks)


def _flat(token_ids: list[list[int]], starts: list[int], blocks: int, block_size: int, num_blocks: int) -> Flat:
    ends = [0]
    for ids in token_ids:
        ends.append(ends[-1] + len(ids))
    # Where the cache is too small for the batch, sequences share blocks: the time is a little too good.
    tables = [1 + i % num_blocks for i in range(blocks * len(token_ids))]
    return Flat(
        token_ids=array("i", [token_id for ids in token_ids for token_id in ids]),
        positions=array(
            "i", [start + i for start, ids in zip(starts, token_ids, strict=True) for i in range(len(ids))]
        ),
        cu_tokens=array("i", ends),
        seq_lens=array("i", [start + len(ids) for start, ids in zip(starts, token_ids, strict=True)]),
        cu_blocks=array("i", range(0, blocks * len(token_ids) + 1, blocks)),
        block_tables=array("i", tables),
        sample_rows=array("i", [end - 1 for end in ends[1:]]),
        block_size=block_size,
        num_decodes=len(token_ids) if len(token_ids[0]) == 1 else 0,
    )
