"""What every request passes before its route: an id, and a bound on its body in bytes, depth and time. Pure ASGI."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Final

import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..hooks.errors import BadRequest
from .errors import error_response
from .limits import check_nesting, drain

_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class BodyTooLarge(BadRequest):
    """More bytes than this server takes."""

    status = 413
    code = "body_too_large"


class BodyTooSlow(BadRequest):
    """The body did not arrive in time."""

    status = 408
    code = "timeout"


class RequestId:
    """Names each request; the answer carries the name as `x-request-id`, and routes find it in the scope.

    The client's own `x-request-id` is kept where it is short and plain. A name that a request still under way has gets
    an ending, so that no two have the same.

    Args:
        on_status: told the status of each answer.
    """

    def __init__(self, app: ASGIApp, *, on_status: Callable[[int], None] | None = None) -> None:
        self._app = app
        self._on_status = on_status
        self._live: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        name = scope["request_id"] = self._name(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                if self._on_status is not None:
                    self._on_status(message["status"])
            await send(message)

        self._live.add(name)
        try:
            return await self._app(scope, receive, send_with_id)
        finally:
            self._live.discard(name)

    def _name(self, scope: Scope) -> str:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        if _ID.fullmatch(given) is None:
            return secrets.token_hex(12)
        name: str = given.decode()
        return f"{name}-{secrets.token_hex(4)}" if name in self._live else name


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
            if body is None:
                return None  # The client has left.
            check_nesting(body)
        except BadRequest as error:
            return await error_response(error)(scope, receive, send)
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
        await drain(receive, len(body))
        raise BodyTooLarge(f"the body must be of at most {self._max_bytes} bytes: send less, or raise max_body_bytes")
