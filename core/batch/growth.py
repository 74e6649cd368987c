"""How many blocks to keep free for what runs already, so that admitting one more does not end in preempting another."""

from __future__ import annotations

from collections.abc import Iterable

from .live import Live

WATERMARK = 0.05
"""Part of the pool that stays free when something runs. vLLM's own table has its best throughput there."""

RHO_START = 0.3
RHO_PREEMPTED = 0.1
RHO_DECAY = 0.995
LENGTH_WEIGHT = 0.05


class Growth:
    """Expected growth of the running sequences, in blocks.

    A sequence is expected to reach the usual length of answers, or the tokens it may have if they are fewer. Of that
    growth the share *rho* is kept free: more after each preemption, less with each request that ends without one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._watermark = int(WATERMARK * num_blocks)
        self._usual_length: float | None = None
        self.rho = RHO_START

    def preempted(self) -> None:
        self.rho = min(1.0, self.rho + RHO_PREEMPTED)

    def ended(self, num_outputs: int) -> None:
        usual = self._usual_length
        self._usual_length = num_outputs if usual is None else usual + LENGTH_WEIGHT * (num_outputs - usual)
        self.rho *= RHO_DECAY

    def reserve(self, running: Iterable[Live]) -> int:
        """Blocks to leave free when one more is admitted next to *running*; 0 when nothing runs."""
        expected, anything = 0.0, False
        for live in running:
            anything = True
            left: float = live.max_tokens - live.num_outputs
            if self._usual_length is not None:
                left = min(left, max(self._block_size, self._usual_length - live.num_outputs))
            else:
                left = min(left, self._block_size)
            expected += left / self._block_size
        return self._watermark + int(self.rho * expected) if anything else 0
