"""A Trio loop under a test clock: components of the loop may ask for the time, and may wait without anybody waiting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from trio.testing import MockClock

from .contract import Broken

T = TypeVar("T")


def on_loop(function: Callable[[], Awaitable[T]], *, patience_s: float = 3600.0) -> T:
    """What *function* gives when it is awaited in a loop whose clock jumps on.

    Raises:
        Broken: it has not returned after *patience_s* of simulated time.
    """

    async def main() -> T:
        with trio.move_on_after(patience_s):
            return await function()
        raise Broken(f"it must come back, and after {patience_s:g} s of simulated time it still waits")

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def in_loop(function: Callable[[], T]) -> T:
    """What *function* gives when it is called in such a loop, without awaiting."""

    async def call() -> T:
        return function()

    return on_loop(call)
