"""The bounded end of a request's line: `stream` puts deltas in, whoever answers the client takes them out.

When the reader does not keep up, text merges into one pending delta a choice and the mailbox itself tells the line to
park the request; when the reader has drained, it tells the line to resume. It does not know what a token is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from ..hooks.messages import Cancel, Delta, Park, Resume

Tell = Callable[[type[Cancel] | type[Park] | type[Resume]], None]


def merge(first: Delta, second: Delta) -> Delta:
    """Two deltas of one choice, as if they had been one."""
    return Delta(
        choice=first.choice,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        num_tokens=first.num_tokens + second.num_tokens,
        finish=second.finish or first.finish,
        usage=second.usage or first.usage,
        error=second.error or first.error,
    )


class Mailbox:
    """Holds *max_deltas* deltas and, beyond them, one merged delta a choice.

    Args:
        max_deltas: deltas kept apart; when there is one more, the request is parked.
        num_choices: choices that must finish before the mailbox has ended.
        clock: seconds.
    """

    def __init__(
        self, *, max_deltas: int, num_choices: int = 1, clock: Callable[[], float] = trio.current_time
    ) -> None:
        self._clock = clock
        self._max_deltas = max_deltas
        self._unfinished = num_choices
        self._deltas: deque[Delta] = deque()
        self._pending: dict[int, Delta] = {}
        self._tell: Tell | None = None
        self._reader: trio.lowlevel.Task | None = None
        """Who waits; a parking lot, with places for many, takes three times as long to wake one."""
        self.last_read = -float("inf")
        """When the reader took a delta last while it was behind, in `trio.current_time()`."""
        self.closed = False
        self.failed = False
        self.parked = False

    def attach(self, tell: Tell) -> None:
        self._tell = tell
        if self.closed:
            tell(Cancel)

    @property
    def ended(self) -> bool:
        """Nothing more will be put in: every choice has finished, or an error came."""
        return self._unfinished <= 0

    def __len__(self) -> int:
        return len(self._deltas) + len(self._pending)

    def put(self, delta: Delta) -> None:
        if self.closed or self.ended:
            return
        if len(self._deltas) < self._max_deltas and not self._pending:
            self._deltas.append(delta)
        else:
            pending = self._pending.get(delta.choice)
            if delta.error is not None:
                self._pending.pop(delta.choice, None)  # An error is the last that the reader hears.
            self._pending[delta.choice] = merge(pending, delta) if pending else delta
            self._park()
        if delta.error is not None:
            self.failed = True
            self._unfinished = 0
        elif delta.finish is not None:
            self._unfinished -= 1
        self._wake()

    def receive_nowait(self) -> Delta | None:
        """The next delta, or None when there is none now."""
        if self._deltas:
            delta = self._deltas.popleft()
        elif self._pending:
            # Everything older has been taken, so the order within each choice is kept.
            delta = self._pending.pop(next(iter(self._pending)))
        else:
            return None
        if self.parked:
            self.last_read = self._clock()
            if not self._pending and len(self._deltas) <= self._max_deltas // 2:
                self.parked = False
                if self._tell is not None:
                    self._tell(Resume)
        return delta

    async def receive(self) -> Delta | None:
        """The next delta, waiting for it; None after the last.

        Raises:
            trio.BusyResourceError: another task waits already.
        """
        waited = False
        while not self._deltas and not self._pending:
            if self.ended or self.closed:
                await trio.lowlevel.checkpoint()
                return None
            await self._wait()
            waited = True
        # The delta is taken after the checkpoint: a reader that is cancelled in it has lost nothing. To have waited is
        # one, and a second would cost each token a turn of the loop.
        if not waited:
            await trio.lowlevel.checkpoint()
        return self.receive_nowait()

    def close(self) -> None:
        """The reader goes. What is still inside is dropped, and the request is cancelled unless it has ended."""
        if self.closed:
            return
        self.closed = True
        self._deltas.clear()
        self._pending.clear()
        self._wake()
        if self._tell is not None:
            self._tell(Cancel)

    @trio.lowlevel.enable_ki_protection
    async def _wait(self) -> None:
        """Until something has been put in, or the mailbox is closed."""
        if self._reader is not None:
            raise trio.BusyResourceError("another task waits for this mailbox")
        self._reader = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._cancelled)

    def _cancelled(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            trio.lowlevel.reschedule(reader)

    def _park(self) -> None:
        if not self.parked:
            self.parked = True
            if self._tell is not None:
                self._tell(Park)
