"""A Trio memory channel that has a name, and knows its depth and how long messages waited and senders were blocked.

One `Inbox` a stage; as many `Outbox` clones as there are stages that send to it. The inbox ends when the last clone is
closed, which is how shutdown runs down the line.
"""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Self, TypeVar

import trio
from msgspec import Struct

T = TypeVar("T")


class ChannelStatistics(Struct, frozen=True, kw_only=True):
    """What a channel has seen. Seconds are sums over all messages.

    Attributes:
        depth: messages in it now.
        wait_s: time messages lay in the channel.
        blocked_s: time senders waited for room.
    """

    name: str
    depth: int
    capacity: int
    num_messages: int
    wait_s: float
    blocked_s: float


class _Counters:
    __slots__ = ("blocked_s", "num_messages", "num_sent", "wait_s")

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_messages = 0
        self.wait_s = 0.0
        self.blocked_s = 0.0


class Outbox(Generic[T]):
    """The end to send into. Each sender owns a clone and closes it."""

    def __init__(self, channel: trio.MemorySendChannel[tuple[float, T]], counters: _Counters) -> None:
        self._channel = channel
        self._counters = counters

    async def send(self, message: T) -> None:
        """Send, waiting for room. Where there is room it is no checkpoint: whoever sends in a loop receives in it too.

        Raises:
            trio.BrokenResourceError: the stage behind it has ended.
        """
        started = trio.current_time()
        try:
            self._channel.send_nowait((started, message))
        except trio.WouldBlock:
            await self._channel.send((started, message))
            self._counters.blocked_s += trio.current_time() - started
        self._counters.num_sent += 1

    def send_nowait(self, message: T) -> None:
        """Send at once.

        Raises:
            trio.WouldBlock: it is full. In the loop of the line that cannot happen: it is sized by the credits.
            trio.BrokenResourceError: the stage behind it has ended.
        """
        self._channel.send_nowait((trio.current_time(), message))
        self._counters.num_sent += 1

    def clone(self) -> Outbox[T]:
        """Another end, for another sender."""
        return Outbox(self._channel.clone(), self._counters)

    def close(self) -> None:
        """This sender has no more to say. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Inbox(Generic[T]):
    """The end a stage reads: `async for message in inbox`."""

    def __init__(
        self, name: str, capacity: int, channel: trio.MemoryReceiveChannel[tuple[float, T]], counters: _Counters
    ) -> None:
        self.name = name
        self.capacity = capacity
        self._channel = channel
        self._counters = counters

    @property
    def num_ready(self) -> int:
        """Messages that are there for the one reader; not those of senders that wait for room."""
        return max(0, self._counters.num_sent - self._counters.num_messages)

    async def receive(self) -> T:
        """The next message, waiting for it.

        Raises:
            trio.EndOfChannel: all senders have closed and nothing is left.
        """
        return self._count(await self._channel.receive())

    def receive_nowait(self) -> T:
        """The next message.

        Raises:
            trio.WouldBlock: there is none now.
            trio.EndOfChannel: there will be none.
        """
        return self._count(self._channel.receive_nowait())

    def clone(self) -> Inbox[T]:
        """Another reader of the same messages; each goes to one of them."""
        return Inbox(self.name, self.capacity, self._channel.clone(), self._counters)

    def close(self) -> None:
        """Stop reading; senders get `BrokenResourceError`. Idempotent."""
        self._channel.close()

    def statistics(self) -> ChannelStatistics:
        counters = self._counters
        return ChannelStatistics(
            name=self.name,
            depth=self._channel.statistics().current_buffer_used,
            capacity=self.capacity,
            num_messages=counters.num_messages,
            wait_s=counters.wait_s,
            blocked_s=counters.blocked_s,
        )

    def _count(self, stamped: tuple[float, T]) -> T:
        sent, message = stamped
        self._counters.num_messages += 1
        self._counters.wait_s += trio.current_time() - sent
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_channel(name: str, capacity: int) -> tuple[Outbox[T], Inbox[T]]:
    """A bounded channel into the stage *name*; capacity ≥ 0 messages."""
    counters = _Counters()
    outbox, inbox = trio.open_memory_channel[tuple[float, T]](capacity)
    return Outbox(outbox, counters), Inbox(name, capacity, inbox, counters)
