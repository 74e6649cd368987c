"""What every HTTP request passes before its route: an id, and a bound on its body in bytes and in time. Pure ASGI."""

from __future__ import annotations

import secrets
from typing import Final

import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..hooks.errors import BadRequest
from .errors import error_response

# A client that is still sending does not read; answered at once, it would see a reset instead of the answer.
DRAIN_BYTES: Final = 64 * 1024**2
DRAIN_S: Final = 5.0


class BodyTooLarge(BadRequest):
    """More bytes than this server takes."""

    status = 413
    code = "body_too_large"


class BodyTooSlow(BadRequest):
    """The body did not arrive in time."""

    status = 408
    code = "timeout"


class RequestId:
    """Names each request; the answer carries the name as `x-request-id`, and routes find it in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = scope["request_id"] = secrets.token_hex(12)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        return await self._app(scope, receive, send_with_id)


class WholeBody:
    """Receives the body before the route runs, which then gets it in one message.

    Args:
        max_bytes: a larger body is answered with 413.
        timeout_s: a slower one with 408.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            body = await self._receive(receive)
        except BadRequest as error:
            return await error_response(error)(scope, receive, send)
        if body is None:
            return None  # The client has left.
        pending: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def receive_whole() -> Message:
            nonlocal pending
            message, pending = pending, None
            return message or await receive()

        return await self._app(scope, receive_whole, send)

    async def _receive(self, receive: Receive) -> bytes | None:
        body = bytearray()
        with trio.move_on_after(self._timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > self._max_bytes:
                    break
                if not message.get("more_body", False):
                    return bytes(body)
        if len(body) <= self._max_bytes:
            raise BodyTooSlow(f"the body must arrive within {self._timeout_s:g} s, got {len(body)} bytes until then")
        await _drain(receive, len(body))
        raise BodyTooLarge(f"the body must be of at most {self._max_bytes} bytes: send less, or raise max_body_bytes")


async def _drain(receive: Receive, num_received: int) -> None:
    with trio.move_on_after(DRAIN_S):
        while num_received < DRAIN_BYTES:
            message = await receive()
            num_received += len(message.get("body", b""))
            if not message.get("more_body", False):
                return
