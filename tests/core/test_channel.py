from __future__ import annotations

import pytest
import trio

from headrace.core.channel import Inbox, Outbox, open_channel


def pair(capacity: int) -> tuple[Outbox[int], Inbox[int]]:
    return open_channel("numbers", capacity)


async def test_messages_arrive_in_order_and_the_inbox_ends_with_its_last_sender() -> None:
    outbox, inbox = pair(3)
    other = outbox.clone()
    outbox.send_nowait(1)
    outbox.close()
    await other.send(2)
    other.close()
    assert [message async for message in inbox] == [1, 2]


async def test_a_full_channel_refuses_at_once_and_counts_how_long_a_sender_was_blocked(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    outbox, inbox = pair(1)
    outbox.send_nowait(1)
    with pytest.raises(trio.WouldBlock):
        outbox.send_nowait(2)
    nursery.start_soon(outbox.send, 2)
    await trio.sleep(3)
    assert [await inbox.receive(), await inbox.receive()] == [1, 2]
    await trio.testing.wait_all_tasks_blocked()
    statistics = inbox.statistics()
    assert (statistics.blocked_s, statistics.wait_s, statistics.num_messages) == (3, 6, 2)


async def test_statistics_know_the_depth() -> None:
    outbox, inbox = pair(4)
    outbox.send_nowait(1)
    outbox.send_nowait(2)
    statistics = inbox.statistics()
    assert (statistics.name, statistics.depth, statistics.capacity) == ("numbers", 2, 4)


async def test_a_closed_inbox_breaks_its_senders() -> None:
    outbox, inbox = pair(1)
    inbox.close()
    with pytest.raises(trio.BrokenResourceError):
        outbox.send_nowait(1)


async def test_to_send_where_there_is_room_does_not_wait() -> None:
    outbox, inbox = pair(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await outbox.send(1)
        await outbox.send(2)
    assert scope.cancelled_caught
    assert [await inbox.receive(), inbox.statistics().depth] == [1, 0]
