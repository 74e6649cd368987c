"""Stop strings in a growing text. Knows neither tokens nor channels.

A text ends at the first place where a stop string is complete; if several are complete there, at the start of the
longest. So the answer does not depend on how the text was cut into pieces, and never waits longer than it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Lets text through up to a stop string, and holds back only what may be the beginning of one.

    Takes time linear in the text, for each stop string: each has its own automaton.

    Source: Knuth, Morris and Pratt 1977, Fast pattern matching in strings, SIAM J. Comput. 6(2).

    Args:
        stops: none of them empty.
    """

    __slots__ = ("_borders", "_firsts", "_found", "_held", "_matched", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        self._held = ""
        self._found = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more *text*.

        Returns:
            text that is safe to emit, and whether a stop string was found. Neither it nor what follows is emitted.
        """
        if self._found:
            return "", True
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            if length := self._advance(character):
                self._found = True
                self._held = ""
                return seen[: end - length], True
        safe = len(seen) - max(self._matched)
        self._held = seen[safe:]
        return seen[:safe], False

    def flush(self) -> str:
        """What is still held back when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Move each automaton on; the length of the longest stop string that is now complete, or 0."""
        longest = 0
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = self._borders[i][matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


@lru_cache(maxsize=256)
def _borders(stop: str) -> Sequence[int]:
    """For each beginning of *stop*, the length of its longest proper beginning that is also its end."""
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + (stop[length] == character))
    return borders
