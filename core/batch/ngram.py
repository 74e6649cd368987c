"""Guesses the next tokens of a sequence from its own past: what followed the last time these tokens stood there.

Source: Saxena 2023, Prompt Lookup Decoding. A guess costs a row of a step; it never changes what is drawn, for each
guessed token is kept only where the draw before it came to the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ...hooks.messages import Sampled, Sequence

if TYPE_CHECKING:
    from .live import Live

NGRAMS: Final = (4, 3, 2)
"""Lengths of the runs looked for, the longest first."""

RATE_WEIGHT: Final = 0.2
RATE_LEAST: Final = 0.3
PAUSE_TOKENS: Final = 32


class Lookup:
    """The runs of one sequence's tokens, and how well guessing from them goes."""

    __slots__ = ("_ends", "_paused_until", "_rate")

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], tuple[int, int]]] = {length: {} for length in NGRAMS}
        """Length → run → (where it ended last, where it ended the time before or -1)."""
        self._rate = 1.0
        self._paused_until = 0

    def extend(self, tokens: array[int], start: int) -> None:
        """Learn the runs that end at *start* or later."""
        for length, ends in self._ends.items():
            for end in range(max(start + 1, length), len(tokens) + 1):
                run = tuple(tokens[end - length : end])
                ends[run] = (end, ends[run][0] if run in ends else -1)

    def guess(self, tokens: array[int], count: int) -> array[int]:
        """At most *count* tokens that may follow *tokens*, all of which have been learned."""
        if len(tokens) < self._paused_until:
            return array("i")
        for length, ends in self._ends.items():
            # The last place of the last run is the end itself; what followed stands at the place before.
            _, end = ends.get(tuple(tokens[-length:]), (0, -1))
            if end >= 0:
                return tokens[end : end + count]
        return array("i")

    def judge(self, num_guessed: int, num_kept: int, num_tokens: int) -> None:
        """Note how a guess went; after poor ones pause for a while."""
        self._rate += RATE_WEIGHT * (num_kept / num_guessed - self._rate)
        if self._rate < RATE_LEAST:
            self._rate = 1.0
            self._paused_until = num_tokens + PAUSE_TOKENS


class Payoff:
    """Whether guessing pays on this machine, now: tokens a second with guesses against without.

    The one that was faster is used, and the other tried again once in *PROBE_STEPS* plans.
    """

    PROBE_STEPS: Final = 32
    PROBE_LENGTH: Final = 2
    WEIGHT: Final = 0.2

    def __init__(self) -> None:
        self._speed: dict[bool, float | None] = {True: None, False: None}
        self._num_steps = 0

    def wanted(self) -> bool:
        """Guess in the next step?"""
        with_guesses, without = self._speed[True], self._speed[False]
        self._num_steps += 1
        probing = self._num_steps % self.PROBE_STEPS < self.PROBE_LENGTH
        if with_guesses is None:
            return True
        if without is None:
            return not probing
        return (with_guesses > without) != probing

    def note(self, guessed: bool, num_tokens: int, seconds: float) -> None:
        """A step of decoding took *seconds* and drew *num_tokens*."""
        if seconds > 0 and num_tokens:
            speed, known = num_tokens / seconds, self._speed[guessed]
            self._speed[guessed] = speed if known is None else known + self.WEIGHT * (speed - known)


class Guesser:
    """Guesses for all sequences whose requests allow it.

    Args:
        num_guesses: tokens guessed for one sequence in one step; 0: none are.
    """

    def __init__(self, num_guesses: int) -> None:
        self._num_guesses = num_guesses
        self._payoff = Payoff()

    def wanted(self) -> bool:
        """Guess in the next step?"""
        return self._num_guesses > 0 and self._payoff.wanted()

    def learn(self, live: Live) -> None:
        """*live* is about to run: learn what it holds so far."""
        if self._num_guesses and live.request.speculate and live.lookup is None:
            live.lookup = Lookup()
            live.lookup.extend(live.tokens, 0)

    def extend(self, live: Live) -> None:
        """One more of its tokens is known."""
        if live.lookup is not None:
            live.lookup.extend(live.tokens, len(live.tokens) - 1)

    def guess(self, live: Live, count: int) -> array[int]:
        """What may follow, at most *count* tokens."""
        assert live.lookup is not None
        return live.lookup.guess(live.tokens, min(count, self._num_guesses))

    def judge(self, sampled: Sampled, lives: Mapping[Sequence, Live]) -> list[int]:
        """Note how the guesses of a step went, and whether they pay; gives the number that was right for each row."""
        if not self._num_guesses:
            return []
        # Of a row's tokens the last one says how many of its guesses were kept.
        kept = {id(row.row): (row.row, row.num_kept) for row in sampled.rows if row.row.num_drafts}
        for row, num_kept in kept.values():
            live = lives.get(row.sequence)
            if live is not None and live.lookup is not None:
                live.lookup.judge(row.num_drafts, num_kept, len(live.tokens))
        if all(row.row.decode for row in sampled.rows):
            self._payoff.note(bool(kept), len(sampled.rows), sampled.forward_s + sampled.sample_s)
        return [num_kept for _, num_kept in kept.values()]
