"""Memory in pages of 2 MiB where the system has them, and pages made ready before they are needed.

A page costs twice: a look-up whenever a step walks through it, and mapping and clearing it when it is first written.
The second can take milliseconds, and a sequence that grows would wait for it within a step. Both are only advice to
the system: where it is not taken, nothing changes but time.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any, Final

from torch import Tensor

PAGE: Final = 2 << 20
SMALL_PAGE: Final = 4096
MADV_HUGEPAGE: Final = 14
MADV_POPULATE_WRITE: Final = 23
SHARE: Final = 1 / 32
"""Of a processor, at most, while steps run. Where clearing a page is quick, as it should be, that is far more than any
steps can fill; some virtual machines take 5 ms for each."""
HURRY: Final = 1 / 8
"""The same where steps have come further than what is ready, and would wait for a page themselves."""
REST_S: Final = 0.005
"""Between two pages at least."""
IDLE_S: Final = 0.1
"""Without a step for so long, nobody has to be left anything."""
NICE: Final = 10


def advise(memory: Tensor) -> None:
    """Ask for large pages under *memory*, from its first whole one to its last."""
    start = -(-memory.data_ptr() // PAGE) * PAGE
    size = (memory.data_ptr() + memory.numel() * memory.element_size() - start) // PAGE * PAGE
    if size > 0:
        _madvise(start, size, MADV_HUGEPAGE)


class Ahead:
    """Makes the next pages of a KV cache ready, in a thread of its own, while steps run.

    Blocks that were never written are taken in ascending order, so what comes next is known: *num_ahead* blocks behind
    the last that a step named. While steps run it takes a small share of one processor's time, for they want it too.

    Args:
        start: address of block 0 in layer 0.
        apart: bytes from one layer to the next.
        block_bytes: bytes of a block in one layer.
        num_blocks: blocks that there are.

    Attributes:
        num_ready: the blocks below this one are ready. Grows; may be read from any thread.
    """

    def __init__(
        self, start: int, *, apart: int, num_layers: int, block_bytes: int, num_blocks: int, num_ahead: int
    ) -> None:
        self._start = start
        self._apart = apart
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._num_ahead = num_ahead
        # Block 0 is written when the cache is made, and its page with it.
        self._end = start + num_layers * apart
        self._ready_to = [self._up(start + i * apart + 1) for i in range(num_layers)]
        self.num_ready = self._wanted = 0
        self._highest = 0
        self._reached = -math.inf
        self._more = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def make_ready(self, num_blocks: int) -> None:
        """Make so many blocks ready at once, before the first step."""
        for _ in range(min(num_blocks, self._num_blocks)):
            self._make_next(rests=False)
        self._wanted = self.num_ready

    def reach(self, block: int) -> None:
        """A step is about to use *block*, and others later. Returns at once."""
        self._reached, self._highest = monotonic(), max(self._highest, block)
        if block + self._num_ahead // 2 < self._wanted or self._wanted == self._num_blocks:
            return
        self._wanted = max(self._wanted, min(block + self._num_ahead, self._num_blocks))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headrace-pages", daemon=True)
            self._thread.start()
        self._more.set()

    def close(self) -> None:
        """End the thread. The memory may go then."""
        self._closed.set()
        self._more.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # Of this thread alone: Linux only.
        while not self._closed.is_set() and self.num_ready < self._num_blocks:
            self._more.wait()
            self._more.clear()
            while self.num_ready < self._wanted and not self._closed.is_set():
                self._make_next(rests=True)

    def _make_next(self, *, rests: bool) -> None:
        """The next block, in all layers."""
        num_ready = self.num_ready + 1
        for layer, ready_to in enumerate(self._ready_to):
            end = self._start + layer * self._apart + num_ready * self._block_bytes
            if end > ready_to and not self._closed.is_set():
                started = monotonic()
                self._ready_to[layer] = self._up(end)
                _madvise(ready_to, self._ready_to[layer] - ready_to, MADV_POPULATE_WRITE)
                if rests:
                    self._closed.wait(self._rest_s(monotonic() - started))
        self.num_ready = num_ready

    def _rest_s(self, took_s: float) -> float:
        """How long to leave the processor to the steps after a page."""
        if monotonic() - self._reached > IDLE_S:
            return 0.0
        share = HURRY if self._highest >= self.num_ready else SHARE
        return max(REST_S, took_s * (1 / share - 1))

    def _up(self, address: int) -> int:
        return min(-(-address // PAGE) * PAGE, self._end // SMALL_PAGE * SMALL_PAGE)


def _madvise(start: int, size: int, advice: int) -> None:
    if (libc := _libc()) is not None:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


@cache
def _libc() -> Any:
    if sys.platform != "linux":
        return None
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.madvise.restype = ctypes.c_int
        return libc
    return None
