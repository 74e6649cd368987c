"""One request's stay in the server: from its entry into the engine until the answer is out or the client gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..hooks.errors import RequestError, RequestFailed
from ..hooks.messages import Request, Usage
from .answers import Collected, Format

if TYPE_CHECKING:
    from ..core.engine import Engine

Start = Callable[[], Request]
"""Makes the request. Raises RequestError; nothing has to be closed then."""

CLIENT_LEFT: Final = 499
CUT_SHORT: Final = "the answer ended before its last part"
SHOWN: Final = ("template", "tokenize", "queued", "prefill", "decode")
"""What `Server-Timing` names, besides the total."""


class Ending(NamedTuple):
    """How an answer ends.

    Attributes:
        write: sends what is left, the end of the body included.
        error: what the client is told in the middle of its answer.
    """

    write: Callable[[], Awaitable[None]]
    error: RequestError | None = None


async def exchange(
    engine: Engine, start: Start, receive: Receive, answer: Callable[[Request], Awaitable[Ending]]
) -> None:
    """Run *answer* for one request until it ends or the client leaves, and close the request in any case.

    Raises:
        RequestError: the client has not been told anything yet.
    """

    async def answer_all(requests: Sequence[Request]) -> Ending:
        return await answer(requests[0])

    await exchange_all(engine, (start,), receive, answer_all)


async def exchange_all(
    engine: Engine,
    starts: Sequence[Start],
    receive: Receive,
    answer: Callable[[Sequence[Request]], Awaitable[Ending]],
) -> None:
    """As `exchange`, for an answer that is made of several requests: all of them end together.

    Closing is synchronous, so that it happens under cancellation too; what must follow (blocks, slots) is the engine's.
    """
    requests: list[Request] = []
    status, error = CLIENT_LEFT, None
    try:
        for start in starts:
            requests.append(start())
        ending = await while_connected(receive, partial(answer, requests))
        if ending is not None:
            status, error = (200, None) if ending.error is None else (ending.error.status, str(ending.error))
            # Unwatched, for a server tells of the end of the body in the words in which it tells of a disconnect.
            await ending.write()
    except RequestError as failure:
        status, error = failure.status, str(failure)
        raise
    except Exception as failure:
        status, error = 500, repr(failure)
        raise
    finally:
        for request in requests:
            engine.close(request, status=status, error=error)


async def while_connected(receive: Receive, work: Callable[[], Awaitable[Ending]]) -> Ending | None:
    """What *work* returns, or None where the client leaves before: then work is cancelled.

    Raises:
        Exception: what *work* raised, bare.
    """
    result: Ending | None = None
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        # The server tells of a disconnect only whoever sits in receive() at that time.
        nursery.start_soon(_cancel_on_disconnect, receive, nursery.cancel_scope)
        try:
            result = await work()
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


async def _cancel_on_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class WholeAnswer:
    """An ASGI application that answers one request when all of the answer is there."""

    def __init__(self, engine: Engine, start: Start, format: Format) -> None:
        self._engine = engine
        self._start = start
        self._format = format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(request: Request) -> Ending:
            choices, usage = await collect(self._engine, request)
            self._format.begin(request)
            timings = self._engine.timings(request)
            body = self._format.answer(self._format.choices(choices), usage, timings)
            return Ending(partial(json_response(body, timings), scope, receive, send))

        await exchange(self._engine, self._start, receive, answer)


async def collect(engine: Engine, request: Request) -> tuple[list[Collected], Usage]:
    """Run *request* to its end.

    Returns:
        its choices and what it used.

    Raises:
        RequestError: what it ended with.
    """
    await engine.submit(request)
    choices = [Collected() for _ in range(request.params.n)]
    usage = None
    while (delta := await engine.receive(request)) is not None:
        if delta.error is not None:
            raise delta.error
        choices[delta.choice].add(delta)
        usage = delta.usage or usage
    if usage is None:
        raise RequestFailed(CUT_SHORT)
    return choices, usage


def json_response(body: bytes, timings: Mapping[str, object]) -> Response:
    """A whole answer, which says in its head where its time went."""
    return Response(body, headers={"server-timing": server_timing(timings)}, media_type="application/json")


def server_timing(timings: Mapping[str, object]) -> str:
    """The header `Server-Timing`: milliseconds in the states that matter most, and in all.

    Source: W3C, Server Timing, section 3.
    """
    shown = {name: timings.get(f"{name}_ms") for name in SHOWN}
    shown["total"] = timings.get("wall_ms")
    return ", ".join(f"{name};dur={duration:g}" for name, duration in shown.items() if isinstance(duration, float))
