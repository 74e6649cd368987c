"""Texts of a wanted length that no prefix cache knows: each request of each run has its own words, from the first on.

What is random follows from two seeds: the run's id gives the words, its seed lengths and order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from .dataset import Entry
from .gauge import Gauge
from .lengths import Fixed
from .settings import Load
from .target import Prompt

NUM_HEAD_WORDS: Final = 4
"""Put in front of all else, so that no two requests begin alike, whatever follows."""
DEFAULT_OUTPUT: Final = Fixed(tokens=128)


class Prompts:
    """The prompts of one run, by their index.

    Args:
        words: to choose from.
        gauge: how many tokens they are.
        entries: of a data set; None: random words.
    """

    def __init__(self, load: Load, words: Sequence[str], gauge: Gauge, entries: Sequence[Entry] | None = None) -> None:
        self._load = load
        self._words = words
        self._gauge = gauge
        self._entries = entries
        num_words = gauge.words_of(load.shared_prefix_tokens)
        self._prefixes = [
            self._draw(f"prefix/{number}", num_words) for number in range(load.num_prefixes if num_words else 0)
        ]

    def __call__(self, index: int) -> Prompt:
        """The same index gives the same prompt. Prefixes take turns, and so do the entries of a data set."""
        lengths = random.Random(f"{self._load.seed}/{index}")
        if self._entries is not None:
            entry = self._entries[index % len(self._entries)]
            own, num_output = [entry.prompt], entry.num_output_tokens
        else:
            wanted = self._load.prompt_tokens.draw(lengths)
            num_words = max(1, self._gauge.words_of(wanted - self._gauge.overhead) - NUM_HEAD_WORDS)
            own, num_output = self._draw(f"{index}/text", num_words), None
        if self._load.output_tokens is not None or num_output is None:
            num_output = (self._load.output_tokens or DEFAULT_OUTPUT).draw(lengths)
        head = self._draw(f"{index}/head", NUM_HEAD_WORDS)
        if self._prefixes:
            own, head = head + own, self._prefixes[index % len(self._prefixes)]
        return Prompt(head=" ".join(head), text=" ".join(own), num_output_tokens=num_output)

    def prefix(self, number: int) -> Prompt:
        """What is asked to warm a prefix: it alone, but for a few words that no other request has."""
        text = self._draw(f"warm/{number}", NUM_HEAD_WORDS)
        return Prompt(head=" ".join(self._prefixes[number]), text=" ".join(text), num_output_tokens=1)

    @property
    def num_prefixes(self) -> int:
        return len(self._prefixes)

    def _draw(self, what: str, number: int) -> list[str]:
        return random.Random(f"{self._load.run_id}/{what}").choices(self._words, k=number)
