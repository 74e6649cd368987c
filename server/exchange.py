"""One request's stay in the server: from its entry into the engine until the answer is out or the client gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..hooks.errors import RequestError, RequestFailed
from ..hooks.messages import Request
from .answers import Collected, Format

if TYPE_CHECKING:
    from ..core.engine import Engine

Start = Callable[[], Request]
"""Makes the request. Raises RequestError; nothing has to be closed then."""

CLIENT_LEFT: Final = 499
CUT_SHORT: Final = "the answer ended before its last part"


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

    Closing is synchronous, so that it happens under cancellation too; what must follow (blocks, slots) is the engine's.

    Raises:
        RequestError: the client has not been told anything yet.
    """
    request = start()
    status, error = CLIENT_LEFT, None
    try:
        ending = await while_connected(receive, partial(answer, request))
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
            body = await self._collect(request)
            return Ending(partial(Response(body, media_type="application/json"), scope, receive, send))

        await exchange(self._engine, self._start, receive, answer)

    async def _collect(self, request: Request) -> bytes:
        await self._engine.submit(request)
        choices = [Collected() for _ in range(request.params.n)]
        usage = None
        while (delta := await self._engine.receive(request)) is not None:
            if delta.error is not None:
                raise delta.error
            choices[delta.choice].add(delta)
            usage = delta.usage or usage
        if usage is None:
            raise RequestFailed(CUT_SHORT)
        timings: dict[str, Any] = self._engine.timings(request)
        return self._format.answer(choices, usage, timings)
