"""Stop watcher `repetition-detector`: ends an answer that goes round in circles.

    [sampling]
    stop_watchers = [{ use = "repetition-detector", options = { min_repeats = 4 } }]

and in a request `"headrace": {"stop": {"repetition-detector": {"min_repeats": 3}}}`. The answer ends as at a stop
string, with what was written up to there. It is looked for in token ids: the last tokens, up to *max_period* of them,
have come *min_repeats* times in a row, and fill at least *min_tokens*.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_repeats: Annotated[int, Meta(ge=0, le=1000)] = 0
    """How often in a row the same tokens may stand, that many ending the answer. 0 and 1: off."""
    max_period: Annotated[int, Meta(ge=1, le=256)] = 64
    """The longest circle that is looked for, in tokens."""
    min_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 32
    """Tokens that the repetition must fill, so that `......` may be short."""


class RepetitionWatcher:
    """For each period, counts how many tokens in a row equal the one a period before. Constant work a token."""

    __slots__ = ("_needed", "_recent", "_runs")

    def __init__(self, params: Params) -> None:
        self._recent: list[int] = []
        """As many as the longest period, the newest last."""
        self._runs = [0] * params.max_period
        self._needed = [
            max(params.min_repeats * period, params.min_tokens) - period for period in range(1, params.max_period + 1)
        ]
        """Equal tokens in a row that make a repetition, besides its first round."""

    def feed(self, text: str, token_id: int) -> bool:
        """See `protocols.StopWatcher`."""
        recent, runs = self._recent, self._runs
        found = False
        for index, earlier in enumerate(reversed(recent)):
            if earlier != token_id:
                runs[index] = 0
            else:
                runs[index] += 1
                found = found or runs[index] >= max(self._needed[index], 1)
        recent.append(token_id)
        if len(recent) > len(runs):
            del recent[0]
        return found


class RepetitionDetector:
    def __init__(self, context: Context, options: Params) -> None:
        pass

    def watch(self, params: Params) -> RepetitionWatcher | None:
        return RepetitionWatcher(params) if params.min_repeats > 1 else None


@plugin
def register_stop(register: Register) -> None:
    register(
        "repetition-detector", RepetitionDetector, config=Params, params=Params, doc="End answers that go in circles."
    )
