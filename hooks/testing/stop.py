"""The contract of the slot `stop`: where an answer ends follows from what it says, not from how it was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import trio
from hypothesis import strategies as st

from .contract import Parametrized, ensure, skip
from .loop import in_loop, on_loop


class StopContract(Parametrized):
    """Feeds answers, token by token.

    Attributes:
        ends: pairs of parameters and an answer at whose very end it must stop, and not before.
        goes_on: pairs of parameters and an answer that must not be stopped.
        by_text: it looks at the text alone, so that the text may arrive in any pieces. False: at the tokens.
        time_limit_s: for one that looks at the clock: seconds after which it must stop, with the first of `params`.
    """

    slot = "stop"
    ends: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()
    goes_on: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()
    by_text: ClassVar[bool] = True
    time_limit_s: ClassVar[float | None] = None

    def stopped(self, params: Mapping[str, Any], pieces: Sequence[str]) -> int | None:
        """How many characters of the answer were fed when it was stopped; None: it was not."""
        return in_loop(lambda: _stopped(self.watcher(params), pieces))

    def watcher(self, params: Mapping[str, Any]) -> Any:
        """A fresh watcher. Call it in the loop."""
        return _opened(self.build(), self._decode(params))

    def test_answers_end_where_they_should(self) -> None:
        if not self.ends and self.time_limit_s is None:
            skip("set ends = [(params, text), …], each text to be stopped at its end")
        for params, text in self.ends:
            place = self.stopped(params, list(text))
            ensure(place == len(text), f"{text!r} must be stopped at its end with {params}, found {place}")

    def test_other_answers_go_on(self) -> None:
        for params, text in self.goes_on or [(self.params[0], "One two, three.")]:
            place = self.stopped(params, list(text))
            ensure(place is None, f"{text!r} must not be stopped with {params}, found it stopped after {place}")

    def test_it_does_not_matter_where_an_answer_is_cut(self) -> None:
        """It is stopped with the piece that brings the character at which it would stop one by one."""
        if not self.by_text:
            skip("by_text = False: it looks at the tokens")

        def check(answer: tuple[Mapping[str, Any], str], cuts: list[int]) -> None:
            params, text = answer
            places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
            pieces = ["", *(text[a:b] for a, b in pairwise(places))]
            exact = self.stopped(params, list(text))
            wanted = None if exact is None else next(place for place in places if place >= exact)
            found = self.stopped(params, pieces)
            ensure(found == wanted, f"{text!r} in the pieces {pieces} must be stopped after {wanted}, found {found}")

        answers = [*self.ends, *self.goes_on] or [(self.params[0], "One two, three.")]
        longer = [(params, f"{text} and so on") for params, text in answers]
        cuts = st.lists(st.integers(0, 500), max_size=8)
        self.for_all(st.sampled_from([*answers, *longer]), cuts, check=check)

    def test_it_says_yes_or_no(self) -> None:
        def feed() -> None:
            for params in self.params:
                said = self.watcher(params).feed("a", 1)
                ensure(isinstance(said, bool), f"feed must return True or False, found {said!r}")

        in_loop(feed)

    def test_two_answers_at_once_do_not_mix(self) -> None:
        def feed() -> None:
            for params, text in [*self.ends, *self.goes_on]:
                stop, decoded = self.build(), self._decode(params)
                watchers = [_opened(stop, decoded), _opened(stop, decoded)]
                alone = _stopped(self.watcher(params), list(text))
                places: list[int | None] = [None, None]
                # The second hears each character just after the first has heard it, up to where that one stops.
                for place, character in enumerate(text, 1):
                    for i, watcher in enumerate(watchers):
                        if places[i] is None and watcher.feed(character, ord(character)):
                            places[i] = place
                ensure(places == [alone, alone], f"{text!r} twice at once must stop at {alone}, found {places}")

        in_loop(feed)

    def test_a_time_limit_is_kept(self) -> None:
        """By the clock of the loop, `trio.current_time()`; a limit by the machine's clock cannot be tried out."""
        limit_s = self.time_limit_s
        if limit_s is None:
            skip("set time_limit_s if it looks at the clock")

        async def feed() -> None:
            watcher = self.watcher(self.params[0])
            for second, wanted in ((0.0, False), (limit_s * 0.9, False), (limit_s * 1.1, True)):
                await trio.sleep_until(second)
                said = watcher.feed("a ", 1)
                ensure(said == wanted, f"{second:g} s into the answer feed must return {wanted}, found {said}")

        on_loop(feed, patience_s=10 * limit_s + 10)

    def _decode(self, params: Mapping[str, Any]) -> Any:
        return type("One", (type(self),), {"params": [params], "_entry": self.entry()})().decoded()[0]


class _Never:
    """Stands for None: these parameters end no answer."""

    def feed(self, text: str, token_id: int) -> bool:
        return False


def _opened(stop: Any, params: Any) -> Any:
    watcher = stop.watch(params)
    return _Never() if watcher is None else watcher


def _stopped(watcher: Any, pieces: Sequence[str]) -> int | None:
    fed = 0
    for piece in pieces:
        fed += len(piece)
        if watcher.feed(piece, ord(piece[0]) if piece else 0):
            return fed
    return None
