"""Prompts out of a file of conversations, in the shape in which ShareGPT's were published.

A JSON list of `{"conversations": [{"from": …, "value": …}, …]}`. Of each, the first thing the human says is a prompt,
and the answer to it tells how long an answer may be.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from ...hooks.errors import StartError

CHARS_PER_TOKEN: Final = 4
"""Of English text, about; tells how long answers are, which nobody tokenizes here."""
HUMANS: Final = ("human", "user")


class Turn(Struct, frozen=True):
    speaker: str = field(name="from")
    value: str = ""


class Conversation(Struct, frozen=True):
    conversations: list[Turn] = []


class Entry(Struct, frozen=True, kw_only=True):
    """A prompt. *num_output_tokens*: about as long as its answer was."""

    prompt: str
    num_output_tokens: int


def read(path: Path, *, seed: int, max_model_len: int | None) -> list[Entry]:
    """The prompts of a file, in an order that *seed* gives.

    Args:
        max_model_len: tokens a prompt and its answer may have, about; longer ones are left out.

    Raises:
        StartError: the file is of another shape, or has no prompt that fits.
    """
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[Conversation])
    except (OSError, msgspec.MsgspecError) as error:
        shape = '[{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}]'
        raise StartError(f"{path} must hold {shape}: {error}") from None
    found = (entry for of in conversations if (entry := _entry(of.conversations)) is not None)
    entries = [entry for entry in found if max_model_len is None or _num_tokens(entry) <= max_model_len]
    if not entries:
        raise StartError(
            f"{path} must hold a human's turn and its answer that fit into {max_model_len} tokens; none does"
        )
    random.Random(seed).shuffle(entries)
    return entries


def _entry(turns: list[Turn]) -> Entry | None:
    for turn, answer in pairwise(turns):
        if turn.speaker in HUMANS and turn.value.strip() and answer.speaker not in HUMANS:
            num_tokens = max(1, len(answer.value) // CHARS_PER_TOKEN)
            return Entry(prompt=turn.value, num_output_tokens=num_tokens)
    return None


def _num_tokens(entry: Entry) -> int:
    return len(entry.prompt) // CHARS_PER_TOKEN + entry.num_output_tokens
