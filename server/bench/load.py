"""One run: gauge the server, warm it up, send the load, and sum up. Gives a report and the records behind it."""

from __future__ import annotations

import signal
import threading
import time
from array import array
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import Final

import trio

from . import dataset
from .connections import connected
from .gauge import measure
from .pace import Tickets, closed_loop, open_loop, poisson
from .prompts import Prompts
from .record import Record, record_of
from .report import Report, Setting, summarize
from .settings import Load
from .target import Prompt, Target
from .wire import parse_url

Progress = Callable[[Record], None]
"""Told of each request that has ended."""
WARMUP_INDEX: Final = 1_000_000_000
"""Of the first request that is not measured, so that its words are nobody else's."""


async def run(load: Load, *, api_key: str | None = None, progress: Progress) -> tuple[Report, list[Record]]:
    """Send *load* and report on it. An interrupt ends the load, and what was complete by then is reported.

    Raises:
        StartError: the server does not answer, or refuses a first request.
    """
    headers = {"user-agent": "headrace-bench", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
    async with connected(parse_url(load.url), headers) as connections:
        target = Target(connections, load.api, load.params, ignore_eos=load.ignore_eos, timeout_s=load.timeout_s)
        await target.find_model(load.model)
        words, gauge = await measure(target, load.run_id)
        entries = None
        if load.dataset is not None:
            entries = dataset.read(load.dataset, seed=load.seed, max_model_len=target.card.max_model_len)
        prompts = Prompts(load, words, gauge, entries)
        await _warm_up(load, target, prompts)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        generator = Generator(target, prompts, progress)
        cpu_s = time.process_time()
        interrupted = await _interruptible(generator, load)
        cpu_s = time.process_time() - cpu_s
    setting = Setting(
        version=metadata.version("headrace"),
        started=started,
        load=load,
        model=target.card.id,
        gauge=gauge,
        interrupted=interrupted,
        cpu_s=cpu_s,
    )
    return summarize(generator.records, setting), generator.records


async def _warm_up(load: Load, target: Target, prompts: Prompts) -> None:
    asked: list[Prompt] = [prompts(WARMUP_INDEX + number) for number in range(load.num_warmups)]
    if load.warm_prefixes:
        asked += [prompts.prefix(number) for number in range(prompts.num_prefixes)]
    for prompt in asked:
        await target.ask(target.encode(prompt))


async def _interruptible(generator: Generator, load: Load) -> bool:
    """Send the load; returns whether it was interrupted. Only the main thread hears of interrupts."""
    interrupted = False
    if threading.current_thread() is not threading.main_thread():
        await generator.send_all(load)
        return interrupted
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal interrupted
                async for _ in signals:
                    interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await generator.send_all(load)
            nursery.cancel_scope.cancel()
    return interrupted


class Generator:
    """Sends prompts and keeps a record of each.

    Attributes:
        records: of the requests that have ended, in the order in which they did.
    """

    def __init__(self, target: Target, prompts: Prompts, progress: Progress) -> None:
        self._target = target
        self._prompts = prompts
        self._progress = progress
        self._began = 0.0
        self._planned: dict[int, float] = {}
        self.records: list[Record] = []

    async def send_all(self, load: Load) -> None:
        """Send *load* at its pace; returns when all has ended."""
        self._began = time.perf_counter()
        tickets = Tickets(load.num_requests, load.duration_s)
        if load.rate is None:
            await closed_loop(self._send, tickets, concurrency=load.concurrency or 1)
            return
        await open_loop(
            self._send,
            tickets,
            times=poisson(load.rate, load.seed),
            plan=self._planned.__setitem__,
            max_in_flight=load.max_in_flight,
            refuse=self._refuse,
        )

    async def _send(self, index: int) -> None:
        body = self._target.encode(self._prompts(index))
        sent, answer = await self._target.ask(body)
        sent_s = sent - self._began
        lag_s = sent_s - self._planned.pop(index, sent_s)
        self._keep(record_of(index, answer, sent, time.perf_counter(), self._began, lag_s))

    def _refuse(self, index: int) -> None:
        now_s = time.perf_counter() - self._began
        message = "as many requests were under way as --max-in-flight lets be"
        self._keep(Record(index=index, sent_s=now_s, end_s=now_s, times=array("d"), error="not sent", message=message))

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._progress(record)
