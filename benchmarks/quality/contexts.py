"""The texts as contexts of 512 tokens, and a model run over one of them.

A text is cut into contexts that do not overlap; what is left at its end is dropped. The second half of each is scored,
as llama-perplexity does it: with 512 tokens those are the 255 rows from 256 to 510.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.cpus import usable_cpus
from headrace.core.kernels import Batch, Model, as_arrays
from headrace.core.model.load import load, quiet
from headrace.core.opened import Opened, open_model
from headrace.hooks import config
from headrace.hooks.protocols import Tokenizer
from headrace.hooks.settings import Settings

TEXTS = Path(__file__).parent / "texts"
NAMES = ("english", "code", "chinese")
LENGTH = 512


def settings(*sets: str) -> Settings:
    """Settings as `headrace serve --set` would read them. The KV cache is as small as one context allows.

    Raises:
        ConfigError: one of *sets* is wrong.
    """
    return config.load(sets=(f"model.max_model_len={LENGTH}", "line.max_running=1", *sets)).settings


@contextmanager
def opened(chosen: Settings) -> Iterator[Opened]:
    """A model that is known but not loaded."""
    found = open_model(chosen, quiet)
    try:
        yield found
    finally:
        found.checkpoint.close()


def load_model(found: Opened, chosen: Settings) -> Model:
    """Load *found* as the engine would: its quantizer, its attention, its kernels."""
    return load(
        found.checkpoint.artifact,
        found.checkpoint,
        found.architecture,
        found.quantizer,
        found.attention,
        num_blocks=num_blocks(chosen.line.block_size),
        block_size=chosen.line.block_size,
        dialect=found.context.kernels,
        num_threads=chosen.model.threads or usable_cpus(),
    )


def num_blocks(block_size: int) -> int:
    """Blocks of a KV cache for one context, the null block included."""
    return 1 + -(-LENGTH // block_size)


def tokenizer(found: Opened, chosen: Settings) -> Tokenizer:
    """The tokenizer of *found*."""
    component = found.registry.build("tokenizer", chosen.model.tokenizer, found.context).component
    return component  # type: ignore[no-any-return]


def contexts(text: str, tokens: Tokenizer, most: int | None = None) -> list[list[int]]:
    """The first *most* contexts of *text* (None: all), each of `LENGTH` token ids. Markers in it are plain text."""
    ids = list(tokens.encode(text, parse_special=False, add_special=False))
    whole = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return whole[:most]


def batch(token_ids: Sequence[int], block_size: int) -> Batch:
    """One context as one chunk of prefill, the rows that are scored sampled."""
    return Batch(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(len(token_ids)),
        cu_tokens=[0, len(token_ids)],
        seq_lens=[len(token_ids)],
        block_tables=[torch.arange(1, num_blocks(block_size))],
        block_size=block_size,
        sample_rows=torch.arange(len(token_ids) // 2, len(token_ids) - 1),
        num_decodes=0,
    )


def logits(model: Model, token_ids: Sequence[int], block_size: int) -> Tensor:
    """What *model* says at the scored rows of a context, `[num_rows, vocab_size]`. Valid until it is asked again."""
    return model.forward_flat(as_arrays(batch(token_ids, block_size)))
