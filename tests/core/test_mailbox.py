from __future__ import annotations

import pytest
import trio

from headrace.core.mailbox import Mailbox
from headrace.hooks.errors import TimedOut
from headrace.hooks.messages import Cancel, Delta, FinishReason, Park, Resume


def mailbox(max_deltas: int = 4, num_choices: int = 1) -> tuple[Mailbox, list[type]]:
    box, told = Mailbox(max_deltas=max_deltas, num_choices=num_choices, clock=lambda: 0.0), []
    box.attach(told.append)
    return box, told


def test_a_full_mailbox_merges_text_and_parks_once() -> None:
    box, told = mailbox(max_deltas=4)
    for i in range(10):
        box.put(Delta(text=f"{i} ", num_tokens=1))
    assert told == [Park]
    assert len(box) == 5
    taken = [box.receive_nowait() for _ in range(5)]
    assert [delta and delta.text for delta in taken] == ["0 ", "1 ", "2 ", "3 ", "4 5 6 7 8 9 "]
    assert sum(delta.num_tokens for delta in taken if delta) == 10


def test_each_choice_merges_into_its_own_delta_and_keeps_its_order() -> None:
    box, _ = mailbox(max_deltas=1, num_choices=2)
    for i in range(6):
        box.put(Delta(choice=i % 2, text=str(i)))
    texts = {0: "", 1: ""}
    while (delta := box.receive_nowait()) is not None:
        texts[delta.choice] += delta.text
    assert texts == {0: "024", 1: "135"}


def test_a_drained_mailbox_resumes() -> None:
    box, told = mailbox(max_deltas=4)
    for _ in range(6):
        box.put(Delta(text="x"))
    box.receive_nowait()
    assert told == [Park], "one delta taken is not drained"
    while box.receive_nowait():
        pass
    assert told == [Park, Resume]
    assert not box.parked


async def test_it_ends_after_every_choice_has_finished() -> None:
    box, _ = mailbox(num_choices=2)
    box.put(Delta(choice=0, text="a", finish=FinishReason.STOP))
    box.put(Delta(choice=1, text="b", finish=FinishReason.LENGTH))
    assert [(await box.receive()) is not None for _ in range(3)] == [True, True, False]


async def test_nothing_follows_an_error() -> None:
    box, _ = mailbox()
    box.put(Delta(error=TimedOut("too late")))
    box.put(Delta(text="more"))
    first, second = await box.receive(), await box.receive()
    assert first is not None
    assert isinstance(first.error, TimedOut)
    assert second is None
    assert box.failed


async def test_closing_cancels_and_wakes_the_reader(nursery: trio.Nursery) -> None:
    box, told = mailbox()
    got: list[Delta | None] = []

    async def read() -> None:
        got.append(await box.receive())

    nursery.start_soon(read)
    await trio.testing.wait_all_tasks_blocked()
    box.close()
    await trio.testing.wait_all_tasks_blocked()
    assert got == [None]
    assert told == [Cancel]
    box.put(Delta(text="late"))
    assert len(box) == 0


async def test_a_reader_that_waits_takes_what_comes_in_one_turn_of_the_loop(nursery: trio.Nursery) -> None:
    class Turns(trio.abc.Instrument):
        num = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.num += task.name == "reader"

    box, _ = mailbox()
    nursery.start_soon(box.receive, name="reader")
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.add_instrument(turns := Turns())
    box.put(Delta(text="here"))
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.remove_instrument(turns)
    assert (turns.num, len(box)) == (1, 0)


async def test_one_reader_waits_at_a_time_and_may_come_again_after_it_was_cancelled(nursery: trio.Nursery) -> None:
    box, _ = mailbox()
    with trio.move_on_after(0):
        await box.receive()
    nursery.start_soon(box.receive)
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(trio.BusyResourceError):
        await box.receive()
    box.put(Delta(text="for the first"))
    box.put(Delta(text="left over"))
    await trio.testing.wait_all_tasks_blocked()
    delta = await box.receive()
    assert delta is not None
    assert delta.text == "left over"


def test_a_read_is_remembered_while_the_reader_is_behind() -> None:
    box = Mailbox(max_deltas=2, clock=lambda: 5.0)
    box.put(Delta(text="a"))
    box.receive_nowait()
    assert box.last_read == -float("inf")
    for _ in range(3):
        box.put(Delta(text="a"))
    assert box.parked
    box.receive_nowait()
    assert box.last_read == 5.0


async def test_a_reader_cancelled_while_it_takes_a_delta_has_not_lost_it() -> None:
    box, _ = mailbox()
    box.put(Delta(text="kept"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await box.receive()
    delta = box.receive_nowait()
    assert delta is not None
    assert delta.text == "kept"
