"""How long steps take, learnt from those that came back, and how much of a prompt fits beside running streams.

Pure arithmetic; knows no sequences. `planner` tells it of each step and asks it for the next.
"""

from __future__ import annotations


class Pace:
    """Keeps what a step of so many decodes takes, and what a token of a prompt adds to it.

    Args:
        target_step_s: how long a step may take that computes prefill beside running streams; None: no matter.
        max_pause: the same in times a step that only decodes; None: no matter.
        start_pause_s: what it may take at least while all running streams are at their start; None: no more than later.
        least: tokens from which on a step says something of a token's time.
    """

    def __init__(
        self,
        *,
        target_step_s: float | None,
        max_pause: float | None,
        start_pause_s: float | None = None,
        least: int,
    ) -> None:
        self._target_step_s = target_step_s
        self._max_pause = max_pause
        self._start_pause_s = start_pause_s
        self._least = least
        self._decode_s: dict[int, float] = {}
        """By number of decodes. Not a line through them: rows of a batch cost more the more memory they read."""
        self._token_s: float | None = None

    def measure(self, num_decodes: int, num_prefill: int, forward_s: float) -> None:
        """A step has come back; counts are of tokens."""
        if not num_prefill:
            if num_decodes:
                # Readers are used to what undisturbed steps take.
                self._decode_s[num_decodes] = _follow(self._decode_s.get(num_decodes), forward_s, rising=0.05)
        elif num_decodes + num_prefill >= self._least:
            decodes_s = self._known(num_decodes)
            if decodes_s is None:
                seen = forward_s / (num_decodes + num_prefill)
            else:
                seen = max(forward_s - decodes_s, 0.1 * forward_s) / num_prefill
            self._token_s = _follow(self._token_s, seen)

    def room(self, num_decodes: int, *, starting: bool = False) -> int | None:
        """Tokens of prompts that fit beside so many decodes; None: no matter how many.

        Args:
            starting: all of these are at their start. Prompts are then read in larger pieces, which cost less a token,
                and nobody is used to a pace yet.
        """
        if not self._token_s or not num_decodes:
            return None
        decodes_s = self._known(num_decodes)
        limits = [] if self._target_step_s is None else [self._target_step_s]
        if self._max_pause is not None and decodes_s is not None:
            pause_s = self._max_pause * decodes_s
            limits.append(max(pause_s, self._start_pause_s or 0.0) if starting else pause_s)
        if not limits:
            return None
        besides = num_decodes * self._token_s if decodes_s is None else decodes_s
        return max(0, int((min(limits) - besides) / self._token_s + 1e-6))

    def _known(self, num_decodes: int) -> float | None:
        """Seconds of a step of so many decodes: seen, or between the next that were, or beside the only one."""
        if not num_decodes or not self._decode_s:
            return None
        if (exact := self._decode_s.get(num_decodes)) is not None:
            return exact
        fewer = max((n for n in self._decode_s if n < num_decodes), default=None)
        more = min((n for n in self._decode_s if n > num_decodes), default=None)
        if fewer is not None and more is not None:
            share = (num_decodes - fewer) / (more - fewer)
            return (1 - share) * self._decode_s[fewer] + share * self._decode_s[more]
        # One sequence more takes about as long as one token more.
        token_s = self._token_s or 0.0
        if fewer is not None:
            return self._decode_s[fewer] + (num_decodes - fewer) * token_s
        assert more is not None
        return max(self._decode_s[more] - (more - num_decodes) * token_s, self._decode_s[more] * num_decodes / more)


def _follow(known: float | None, seen: float, *, rising: float = 0.3) -> float:
    """A running mean that no single step throws far off: a machine that did something else for a moment is not slow.

    Args:
        rising: the weight of *seen* where it is more than what was known.
    """
    if not known:
        return seen
    weight = rising if seen > known else 0.3
    return (1 - weight) * known + weight * min(max(seen, known / 2), 2 * known)
