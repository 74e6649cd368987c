"""The answer to several prompts at once: one request for each, whose choices stand side by side.

They run together and end together: the first error is that of the whole answer. A stream takes the deltas of each as
they come; a write that is blocked holds back all of them, so that their mailboxes fill and park them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
from starlette.types import Receive, Scope, Send

from ..hooks.errors import BadRequest, RequestError
from ..hooks.messages import Request, Usage
from .answers import JSON, Collected, Format
from .exchange import Ending, Start, collect, exchange_all, json_response
from .sse import HEADERS, Events, error_event

if TYPE_CHECKING:
    from ..core.engine import Engine


class SeveralAnswers:
    """An ASGI application that answers several requests when all of their answers are there.

    Args:
        starts, formats: one for each prompt, in order.
    """

    def __init__(self, engine: Engine, starts: Sequence[Start], formats: Sequence[Format]) -> None:
        self._engine = engine
        self._starts = starts
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(requests: Sequence[Request]) -> Ending:
            check_room(self._engine, requests)
            answers = await self._collect(requests)
            choices: list[JSON] = []
            for request, format, (collected, _) in zip(requests, self._formats, answers, strict=True):
                format.begin(request)
                choices += format.choices(collected)
            timings = slowest(self._engine, requests)
            body = self._formats[0].answer(choices, total(usage for _, usage in answers), timings)
            return Ending(partial(json_response(body, timings), scope, receive, send))

        await exchange_all(self._engine, self._starts, receive, answer)

    async def _collect(self, requests: Sequence[Request]) -> list[tuple[list[Collected], Usage]]:
        answers: dict[Request, tuple[list[Collected], Usage]] = {}
        failure: RequestError | None = None

        async def run(request: Request) -> None:
            nonlocal failure
            try:
                answers[request] = await collect(self._engine, request)
            except RequestError as error:
                failure = failure or error
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(run, request)
        if failure is not None:
            raise failure
        return [answers[request] for request in requests]


class SeveralStreams:
    """An ASGI application that streams the answers to several requests into one body.

    Args:
        starts, formats: one for each prompt, in order.
        ping_s: see `TokenStream`.
    """

    def __init__(self, engine: Engine, starts: Sequence[Start], formats: Sequence[Format], *, ping_s: float) -> None:
        self._engine = engine
        self._starts = starts
        self._formats = formats
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(requests: Sequence[Request]) -> Ending:
            check_room(self._engine, requests)
            return await self._answer(requests, send)

        await exchange_all(self._engine, self._starts, receive, answer)

    async def _answer(self, requests: Sequence[Request], send: Send) -> Ending:
        body = Body(send, self._ping_s)
        usages: list[Usage] = []
        failure: RequestError | None = None

        async def run(request: Request, format: Format) -> None:
            nonlocal failure
            try:
                usages.append(await self._stream(request, format, body))
            except RequestError as error:
                # Not in the middle of somebody's write, for the client is to be told of the error.
                async with body.lock:
                    failure = failure or error
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as pinging:
            pinging.start_soon(body.ping)
            async with trio.open_nursery() as nursery:
                for request, format in zip(requests, self._formats, strict=True):
                    nursery.start_soon(run, request, format)
            async with body.lock:
                pinging.cancel_scope.cancel()
        if failure is None:
            last = self._formats[0].end(total(usages), slowest(self._engine, requests))
        elif not body.begun:
            raise failure
        else:
            last = error_event(failure)
        return Ending(partial(send, {"type": "http.response.body", "body": last, "more_body": False}), failure)

    async def _stream(self, request: Request, format: Format, body: Body) -> Usage:
        """Write one request's events.

        Raises:
            RequestError: what it ended with.
        """
        await self._engine.submit(request)
        events = Events(self._engine, request, format, alone=False)
        while not events.ended:
            out = await events.next()
            if events.error is not None:
                raise events.error
            if out:
                await body.write(out)
        assert events.usage is not None
        return events.usage


class Body:
    """The body of a stream that several write into, one at a time. It begins with the first write.

    Attributes:
        begun: the client has been told that all is well.
        lock: whoever holds it knows that nobody is in the middle of a write.
    """

    def __init__(self, send: Send, ping_s: float) -> None:
        self._send = send
        self._ping_s = ping_s
        self._last = trio.current_time()
        self.lock = trio.Lock()
        self.begun = False

    async def write(self, out: bytes) -> None:
        async with self.lock:
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._send({"type": "http.response.body", "body": out, "more_body": True})
            self._last = trio.current_time()

    async def ping(self) -> None:
        """Run beside the writes: a comment where there were none for a while."""
        while True:
            await trio.sleep_until(self._last + self._ping_s)
            if trio.current_time() >= self._last + self._ping_s:
                await self.write(b": ping\n\n")


def check_room(engine: Engine, requests: Sequence[Request]) -> None:
    """Raises:
    BadRequest: so many choices can never be in the line at once.
    """
    num_choices = sum(request.params.n for request in requests)
    if num_choices > engine.max_sequences:
        raise BadRequest(
            f"prompt: prompts times n must be <= {engine.max_sequences}, got {num_choices}: send fewer at once",
            param="prompt",
        )


def total(usages: Iterable[Usage]) -> Usage:
    """What all of them used."""
    all_of = list(usages)
    return Usage(
        prompt=sum(usage.prompt for usage in all_of),
        completion=sum(usage.completion for usage in all_of),
        cached=sum(usage.cached for usage in all_of),
    )


def slowest(engine: Engine, requests: Sequence[Request]) -> JSON:
    """Where the time of the request went that took longest."""
    return max(map(engine.timings, requests), key=lambda timings: cast(float, timings.get("wall_ms", 0.0)))
