"""`core/text.py` against a slow reading of its one rule."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.text import StopStrings


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The rule: the text ends where a stop string is first complete, and loses the longest that is."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def run(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    watch = StopStrings(stops)
    emitted, found = "", False
    for piece in pieces:
        text, found = watch.feed(piece)
        emitted += text
        if found:
            break
    return emitted + watch.flush(), found


letters = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


@given(st.lists(letters, max_size=12), stop_strings)
def test_the_cut_does_not_depend_on_the_chunks(pieces: list[str], stops: tuple[str, ...]) -> None:
    assert run(pieces, stops) == cut("".join(pieces), stops)


@given(letters, st.text("ab", min_size=1, max_size=5))
def test_one_stop_string_cuts_at_its_first_occurrence(text: str, stop: str) -> None:
    before, found, _ = text.partition(stop)
    assert run(list(text), (stop,)) == (before, bool(found))


@given(st.lists(letters, max_size=12), stop_strings)
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: tuple[str, ...]) -> None:
    watch = StopStrings(stops)
    seen = emitted = ""
    for piece in pieces:
        text, found = watch.feed(piece)
        if found:
            break
        seen, emitted = seen + piece, emitted + text
        beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
        held = max((len(start) for start in beginnings if seen.endswith(start)), default=0)
        assert emitted == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("stops", "text", "left"),
    [
        (("aab", "aa"), "xaaab", "x"),
        (("aab",), "aaab", "a"),
        (("abab",), "aababab", "a"),
        (("x",), "x", ""),
        (("\n\nUser:",), "Hi.\n\n\nUser: yes", "Hi.\n"),
        (("</a>", ">"), "b</a>", "b"),
        (("😀!",), "😀😀!", "😀"),
    ],
)
def test_stop_strings_that_overlap_themselves_or_each_other(stops: tuple[str, ...], text: str, left: str) -> None:
    assert run(list(text), stops) == run([text], stops) == (left, True)


def test_a_stop_string_over_many_chunks_is_held_back_until_it_is_complete() -> None:
    watch = StopStrings(("<|end|>",))
    assert [watch.feed(piece) for piece in ("Hi <", "|", "en", "d|", ">")] == [
        ("Hi ", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_held_back_text_is_released_once() -> None:
    watch = StopStrings(("abcd",))
    assert watch.feed("xabc") == ("x", False)
    assert watch.feed("abc") == ("abc", False)
    assert watch.flush() == "abc"
    assert watch.flush() == ""


def test_nothing_follows_a_stop_string() -> None:
    watch = StopStrings(("b",))
    assert watch.feed("ab") == ("a", True)
    assert watch.feed("more") == ("", True)
    assert watch.flush() == ""


def test_without_stop_strings_text_passes_as_it_is() -> None:
    assert StopStrings(()).feed("anything") == ("anything", False)


def test_a_long_text_that_nearly_stops_takes_linear_time() -> None:
    def seconds(length: int) -> float:
        watch = StopStrings(("a" * 500 + "b",))
        start = time.process_time()
        for _ in range(length):
            watch.feed("a")
        return time.process_time() - start

    # Rescans would make this 16 times as long for 4 times the text; machine noise stays well under twice.
    assert min(seconds(20_000) for _ in range(3)) < 8 * min(seconds(5_000) for _ in range(3))
