"""When requests are sent: closed loop, where one that ends makes place for the next, or open loop, at times of its own.

Knows nothing of what is sent. Time is `trio.current_time()`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator

import trio

Send = Callable[[int], Awaitable[None]]
"""Sends the request of an index and waits for its answer."""


class Tickets:
    """Gives out indices from 0 on, as many as asked for, and none when the time is over."""

    def __init__(self, num_requests: int | None, duration_s: float | None) -> None:
        self._num_requests = float("inf") if num_requests is None else num_requests
        self._deadline = float("inf") if duration_s is None else trio.current_time() + duration_s
        self._next = 0

    def take(self, at: float | None = None) -> int | None:
        """The next index, or None. *at*: when it is to be sent; None: now."""
        at = trio.current_time() if at is None else at
        if self._next >= self._num_requests or at >= self._deadline:
            return None
        self._next += 1
        return self._next - 1


async def closed_loop(send: Send, tickets: Tickets, *, concurrency: int) -> None:
    """Keep *concurrency* requests under way."""

    async def work() -> None:
        while (index := tickets.take()) is not None:
            await send(index)

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(work)


async def open_loop(
    send: Send,
    tickets: Tickets,
    *,
    times: Iterator[float],
    plan: Callable[[int, float], None],
    max_in_flight: int,
    refuse: Callable[[int], None],
) -> None:
    """Send at each of *times*, however many are under way.

    Args:
        times: seconds from now, ascending.
        plan: told of an index and its time before it is sent.
        refuse: told of an index that would have been one too many under way.
    """
    began = trio.current_time()
    places = trio.Semaphore(max_in_flight)

    async def sent(index: int) -> None:
        try:
            await send(index)
        finally:
            places.release()

    async with trio.open_nursery() as nursery:
        for at in times:
            index = tickets.take(began + at)
            if index is None:
                return
            await trio.sleep_until(began + at)
            try:
                places.acquire_nowait()
            except trio.WouldBlock:
                refuse(index)
            else:
                plan(index, at)
                nursery.start_soon(sent, index)


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Seconds of the arrivals of a Poisson process, without end. *rate*: of them a second, on average."""
    rng = random.Random(f"{seed}/arrivals")
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at
