"""The answer to one request of a socket, as messages.

Deltas are taken from the request's mailbox when the socket has taken those before, and all that waits there then goes
out as one message a choice. So a socket that is slow fills mailboxes, which park their requests, and nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct
from starlette.requests import HTTPConnection

from ..hooks.errors import BadRequest, RequestError, RequestFailed
from ..hooks.messages import Delta, Request, TokenLogprobs, Usage
from . import ws_messages as wire
from .answers import LEAST_LOGPROB, usage_object
from .exchange import CLIENT_LEFT, CUT_SHORT
from .limits import timeout_s
from .schemas import ChatBody, CompletionBody, Extension, decode

if TYPE_CHECKING:
    from ..core.engine import Engine, ModelInfo

MAX_TEXT: Final = 16384
"""Characters after which no more deltas are joined to those that will be sent together."""

Make = Callable[[wire.Start], Request]
Serving = Callable[[str | None], "ModelInfo"]
"""Whether the model is there, under the name that a client has for it. Raises RequestError."""
Put = Callable[[list[str]], Awaitable[None]]
"""Hands frames to the socket; returns when it takes them."""

log = structlog.get_logger()


async def answer(engine: Engine, make: Make, start: wire.Start, put: Put) -> wire.Done | wire.Error:
    """Run the request of *start* and put its deltas; the request is closed in any case.

    Returns:
        What ends it. Cancelled, there is nothing to return, and the caller's word is the last.
    """
    request: Request | None = None
    status, told = CLIENT_LEFT, None
    try:
        request = make(start)
        done = await Answer(engine, request, start.id, put).run()
        status = 200
        return done
    except RequestError as error:
        status, told = error.status, str(error)
        return wire.error_message(start.id, error)
    except Exception as error:
        # The other requests of the socket have nothing to do with it.
        log.exception("a request of a WebSocket failed", id=start.id)
        status, told = 500, repr(error)
        unforeseen = RequestFailed("something unforeseen went wrong here; the server's log has it")
        return wire.error_message(start.id, unforeseen)
    finally:
        if request is not None:
            engine.close(request, status=status, error=told)


def make_request(engine: Engine, serving: Serving, handshake: HTTPConnection, start: wire.Start) -> Request:
    """The engine's request, from a body as the HTTP routes take it. Close it in the end.

    Args:
        handshake: what its headers say of time limits holds for each request of the socket.

    Raises:
        RequestError: it cannot be; nothing has to be closed then.
    """
    raw = bytes(start.request)
    body = decode(raw, ChatBody) if start.kind == "chat" else decode(raw, CompletionBody)
    serving(body.model)
    body.refuse_unsupported()
    if body.prompt_logprobs is not None:
        reason = "prompt_logprobs is not supported on a socket: ask for a whole answer over HTTP"
        raise BadRequest(reason, param="prompt_logprobs", code="unsupported_parameter")
    extension = body.headrace or Extension()
    return engine.request(
        body.prompt() if isinstance(body, ChatBody) else body.text_or_ids(),
        body.params(),
        id=f"ws-{token_hex(12)}",
        extra=extension.logits,
        sampler=extension.sampler,
        stop=extension.stop,
        priority=extension.priority,
        timeout_s=timeout_s(handshake.headers, extension.allowed_s),
        patience_s=extension.patience_s,
        tenant=handshake.scope.get("tenant", ""),
    )


class Piece(Struct):
    """What is not yet sent of one choice."""

    text: str = ""
    n: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: bool = False

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.n += delta.num_tokens
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finished = self.finished or delta.finish is not None

    @property
    def visible(self) -> bool:
        """Whether a client would see anything. Tokens without text are counted with what follows them."""
        return bool(self.text or self.token_ids or (self.finished and self.n))


class Answer:
    """The deltas of one request, under the client's id for it."""

    def __init__(self, engine: Engine, request: Request, id: str, put: Put) -> None:
        self._engine = engine
        self._request = request
        self._id = id
        self._put = put
        self._pieces: dict[int, Piece] = {}
        self._reasons: dict[int, str] = {}
        self._usage: Usage | None = None
        self._num_sent = 0

    async def run(self) -> wire.Done:
        """Raises:
        RequestError: the request did not end well; what came before has been put.
        """
        await self._engine.submit(self._request)
        num_choices = self._request.params.n
        while len(self._reasons) < num_choices:
            error = await self._take()
            if frames := self._frames():
                await self._put(frames)
            if error is not None:
                raise error
        if self._usage is None:
            raise RequestFailed(CUT_SHORT)
        return wire.Done(
            id=self._id,
            reasons=[self._reasons[choice] for choice in range(num_choices)],
            usage=usage_object(self._usage),
            timings=self._engine.timings(self._request),
            system_fingerprint=self._request.stack.fingerprint if self._request.stack else "",
        )

    async def _take(self) -> RequestError | None:
        """Add to the pieces what is in the mailbox, after waiting for something. Gives the error that ends it all."""
        delta = await self._engine.receive(self._request)
        if delta is None:
            return RequestFailed(CUT_SHORT)
        num_chars = 0
        while delta is not None:
            if delta.error is not None:
                return delta.error
            self._pieces.setdefault(delta.choice, Piece()).add(delta)
            self._usage = delta.usage or self._usage
            if delta.finish is not None:
                self._reasons[delta.choice] = delta.finish
            num_chars += len(delta.text)
            delta = self._engine.receive_nowait(self._request) if num_chars < MAX_TEXT else None
        return None

    def _frames(self) -> list[str]:
        visible = [choice for choice, piece in self._pieces.items() if piece.visible]
        return [wire.encode(self._message(choice, self._pieces.pop(choice))) for choice in visible]

    def _message(self, choice: int, piece: Piece) -> wire.Delta:
        seq = self._num_sent
        self._num_sent += 1
        # Token ids come without log-probabilities where the request asked for them alone.
        listed = [self._scored(id, of) for id, of in zip(piece.token_ids, piece.logprobs, strict=False)]
        return wire.Delta(
            id=self._id,
            choice=choice,
            seq=seq,
            text=piece.text,
            n=piece.n,
            token_ids=piece.token_ids,
            logprobs=listed,
        )

    def _scored(self, id: int, of: TokenLogprobs) -> wire.Scored:
        tops = zip(of.top_ids, of.top_logprobs, strict=True)
        return wire.Scored(
            token=self._engine.token_text(id)[0],
            logprob=max(of.logprob, LEAST_LOGPROB),
            top=[(self._engine.token_text(top)[0], top, max(logprob, LEAST_LOGPROB)) for top, logprob in tops],
        )
