"""The contracts of the slots `tool_parser` and `reasoning_parser`: an answer is split the same, however it arrives.

An event is a piece of the answer as OpenAI's streams have it: text under `content`, thinking under a key of its own,
and `tool_calls`, a list of objects that say which call they go on with (`index`). Folded, they are the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import strategies as st

from .contract import Contract, ensure, skip

RANDOM_KEYS = ("id",)
"""Of a tool call: may be another one each time."""
WHOLE_KEYS = ("id", "name", "type", "index", "role")
"""What comes once and whole; other texts go on where they stopped."""


class _ParserContract(Contract):
    """Feeds answers in pieces.

    Attributes:
        answers: pairs of a whole answer and what its events come to, folded, without ids of calls.
        plain: an answer without anything to be found in it.
        max_held: characters of a plain answer that may be held back, for they may become a marker.
    """

    answers: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]] = ()
    plain: ClassVar[str] = "The mill stands by the river, and 2 < 3. "
    max_held: ClassVar[int] = 64

    def parsed(self, pieces: Sequence[str]) -> dict[str, Any]:
        """What the events of one answer come to."""
        stream = self.build().stream()
        events = [event for piece in pieces for event in stream.feed(piece)]
        events += stream.finish()
        for event in events:
            ensure(isinstance(event, Mapping), f"an event must be a mapping, found {event!r}")
            try:
                json.dumps(event)
            except TypeError:
                ensure(False, f"an event must be what JSON can say, found {event!r}")
        return fold(events)

    def test_answers_come_to_what_they_should(self) -> None:
        if not self.answers:
            skip("set answers = [(text, what its events come to), …]")
        for text, wanted in self.answers:
            found = self.parsed([text])
            ensure(found == wanted, f"{text!r} must come to {wanted}, found {found}")

    def test_it_does_not_matter_where_an_answer_is_cut(self) -> None:
        """Into any pieces, empty ones too; and where it breaks off, what was said so far is split the same."""

        def check(text: str, cuts: list[int], end: int) -> None:
            text = text[: max(1, end % (2 * len(text)))]
            places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
            pieces = ["", *(text[a:b] for a, b in pairwise(places))]
            wanted = self.parsed([text])
            for way in (pieces, list(text)):
                found = self.parsed(way)
                ensure(found == wanted, f"{text!r} must come to {wanted} in any pieces, found {found} with {way}")

        texts = [text for text, _ in self.answers] + [self.plain]
        self.for_all(
            st.sampled_from(texts), st.lists(st.integers(0, 500), max_size=8), st.integers(1, 999), check=check
        )

    def test_an_answer_without_markers_is_text(self) -> None:
        found = self.parsed([self.plain])
        ensure(found == {"content": self.plain}, f"{self.plain!r} must come to its content alone, found {found}")

    def test_text_is_not_held_back(self) -> None:
        """Who reads a stream sees what was said so far."""
        stream, told = self.build().stream(), 0
        for said, character in enumerate(self.plain * 8, 1):
            told += len(fold(stream.feed(character)).get("content", ""))
            ensure(said - told <= self.max_held, f"at most {self.max_held} characters may be held back (max_held)")

    def test_two_answers_at_once_do_not_mix(self) -> None:
        def check(first: str, second: str) -> None:
            parser = self.build()
            streams, texts = (parser.stream(), parser.stream()), (first, second)
            events: tuple[list[Mapping[str, Any]], ...] = ([], [])
            for place in range(max(map(len, texts))):
                for stream, text, heard in zip(streams, texts, events, strict=True):
                    heard += stream.feed(text[place : place + 1])
            for stream, text, heard in zip(streams, texts, events, strict=True):
                heard += stream.finish()
                found, wanted = fold(heard), self.parsed([text])
                ensure(found == wanted, f"{text!r} must come to {wanted} beside another answer, found {found}")

        texts = st.sampled_from([text for text, _ in self.answers] + [self.plain])
        self.for_all(texts, texts, check=check)


class ToolParserContract(_ParserContract):
    """What the parser finds of calls, and of text around them."""

    slot = "tool_parser"


class ReasoningParserContract(_ParserContract):
    """What the parser takes for thinking, and for the answer."""

    slot = "reasoning_parser"


def fold(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a client that adds up the events has in the end. Empty texts are nothing."""
    message: dict[str, Any] = {}
    for event in events:
        _add(message, event)
    return message


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if key in RANDOM_KEYS or value is None or value == "":
            continue
        if isinstance(value, str) and key not in WHOLE_KEYS:
            whole[key] = whole.get(key, "") + value
        elif isinstance(value, Mapping):
            _add(whole.setdefault(key, {}), value)
        elif isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value):
            _add_items(whole.setdefault(key, []), value)
        else:
            ensure(whole.get(key, value) == value, f"{key} must stay {whole.get(key)!r}, found {value!r} after it")
            whole[key] = value


def _add_items(whole: list[dict[str, Any]], parts: Sequence[Mapping[str, Any]]) -> None:
    for part in parts:
        known = next((each for each in whole if "index" in part and each.get("index") == part["index"]), None)
        if known is None:
            known = {}
            whole.append(known)
        _add(known, part)
