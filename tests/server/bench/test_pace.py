from itertools import islice

import pytest
import trio
import trio.testing

from headrace.server.bench.pace import Tickets, closed_loop, open_loop, poisson


def test_poisson_arrivals_come_at_the_rate_and_vary_as_much_as_their_mean():
    times = list(islice(poisson(4.0, seed=7), 20_000))
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.02)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.05)


def test_the_seed_decides_when_requests_arrive():
    first, again, other = (list(islice(poisson(1.0, seed), 5)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


class Sender:
    """Takes *seconds* for each request."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began: dict[int, float] = {}
        self.most = self._live = 0

    async def __call__(self, index: int) -> None:
        self.began[index] = trio.current_time()
        self._live += 1
        self.most = max(self.most, self._live)
        await trio.sleep(self.seconds)
        self._live -= 1


async def test_a_closed_loop_keeps_so_many_under_way_and_sends_each_once(autojump_clock):
    send, started = Sender(1.0), trio.current_time()
    await closed_loop(send, Tickets(10, None), concurrency=4)
    assert sorted(send.began) == list(range(10))
    assert send.most == 4
    assert trio.current_time() - started == 3.0


async def test_a_closed_loop_sends_nothing_after_its_time_and_finishes_what_is_under_way(autojump_clock):
    send, started = Sender(2.0), trio.current_time()
    await closed_loop(send, Tickets(None, 5.0), concurrency=1)
    assert len(send.began) == 3
    assert trio.current_time() - started == 6.0


async def run_open(send, tickets, times, *, max_in_flight=100):
    planned, refused = {}, []
    await open_loop(
        send,
        tickets,
        times=iter(times),
        plan=planned.__setitem__,
        max_in_flight=max_in_flight,
        refuse=refused.append,
    )
    return planned, refused


async def test_an_open_loop_sends_at_its_times_however_many_are_under_way(autojump_clock):
    send, started = Sender(100.0), trio.current_time()
    planned, _ = await run_open(send, Tickets(None, None), [0.5, 0.75, 3.0])
    assert {index: at - started for index, at in send.began.items()} == planned == {0: 0.5, 1: 0.75, 2: 3.0}
    assert send.most == 3


async def test_an_open_loop_refuses_what_is_one_too_many_under_way(autojump_clock):
    send = Sender(1.0)
    _, refused = await run_open(send, Tickets(4, None), [0.0, 0.1, 0.2, 1.5, 9.0], max_in_flight=2)
    assert refused == [2]
    assert sorted(send.began) == [0, 1, 3]


async def test_an_open_loop_waits_for_no_arrival_after_its_time(autojump_clock):
    send, started = Sender(1.0), trio.current_time()
    await run_open(send, Tickets(None, 4.0), [1.0, 2.0, 5.0])
    assert trio.current_time() - started == 3.0
