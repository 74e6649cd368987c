"""What a request or connection may measure at most: header fields, nesting, seconds, open sockets.

Bodies are bounded in middleware.py, writes in hardening.py, and requests and tokens by the line's credits.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, Final

import hypercorn.trio.run
import msgspec
import trio
from msgspec import Meta
from starlette.types import ASGIApp, Receive, Scope, Send

from ..hooks.errors import BadRequest
from .errors import error_response
from .hardening import Config, SafeTCPServer

MAX_NESTING: Final = 100
"""Arrays and objects within each other in a JSON body."""

TIMEOUT_HEADER: Final = "x-request-timeout-ms"

# A client that is still sending does not read; answered at once, it would see a reset instead of the answer.
DRAIN_BYTES: Final = 64 * 1024**2
DRAIN_S: Final = 5.0

# The closing quote may be missing: else each quote of an unclosed string would scan to the end again.
_STRINGS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_AS_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HeadersTooLarge(BadRequest):
    """More header fields, or larger ones, than this server takes."""

    status = 431
    code = "headers_too_large"


class HeaderLimit:
    """ASGI middleware that bounds the header of a request, whichever HTTP brought it.

    Args:
        max_bytes: names and values of all fields together.
    """

    def __init__(self, app: ASGIApp, *, max_headers: int, max_bytes: int) -> None:
        self._app = app
        self._max_headers = max_headers
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = scope["headers"]
        if len(headers) > self._max_headers:
            reason = f"a request must have at most {self._max_headers} header fields, got {len(headers)}"
        elif (size := sum(len(name) + len(value) for name, value in headers)) > self._max_bytes:
            reason = f"header fields must be of at most {self._max_bytes} bytes together, got {size}"
        else:
            return await self._app(scope, receive, send)
        await drain(receive)
        return await error_response(HeadersTooLarge(reason))(scope, receive, send)


class ConnectionLimit:
    """How many connections may be open at once."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_open = 0


class LimitedConfig(Config):
    """Hypercorn's settings and the limit on connections."""

    connections: ConnectionLimit


class LimitedTCPServer(SafeTCPServer):
    """One connection among so many; one too many is told so in a line and closed."""

    config: LimitedConfig

    async def run(self) -> None:
        limit = self.config.connections
        if limit.num_open >= limit.max_connections:
            if isinstance(self.stream, trio.SocketStream):
                with trio.move_on_after(1):
                    await self.stream.send_all(_FULL)
            return await trio.aclose_forcefully(self.stream)
        limit.num_open += 1
        try:
            await super().run()
        finally:
            limit.num_open -= 1


def install() -> None:
    """Let Hypercorn count its connections; after `hardening.install`. Idempotent."""
    hypercorn.trio.run.TCPServer = LimitedTCPServer  # type: ignore[attr-defined]


def check_nesting(body: bytes, max_nesting: int = MAX_NESTING) -> None:
    """Refuse JSON that is nested too deeply, before anything recurses into it.

    Raises:
        BadRequest: it is.
    """
    if sum(map(body.count, (b"[", b"{"))) <= max_nesting:
        return
    # Strings go, then everything but brackets; each of these is a step up or down. Decoding finds those without a pair.
    steps = array("b", _STRINGS.sub(b"", body).translate(None, _NO_BRACKETS).translate(_AS_STEPS))
    if max(accumulate(steps), default=0) > max_nesting:
        raise BadRequest(f"the body must be JSON nested at most {max_nesting} deep")


def timeout_s(headers: Mapping[str, str], asked_s: float | None) -> float | None:
    """Seconds a request may take: the least of what its header and its body allow; None: no limit.

    Raises:
        BadRequest: the header is no positive number of milliseconds.
    """
    limits = [] if asked_s is None else [asked_s]
    text = headers.get(TIMEOUT_HEADER)
    if text is not None:
        try:
            limits.append(msgspec.convert(text, Annotated[int, Meta(gt=0, le=10**9)], strict=False) / 1000)
        except msgspec.ValidationError:
            reason = f"{TIMEOUT_HEADER}: must be a whole number of milliseconds from 1 to 10^9, got {text[:40]!r}"
            raise BadRequest(reason, param=TIMEOUT_HEADER) from None
    return min(limits, default=None)


async def drain(receive: Receive, num_received: int = 0) -> None:
    """Take in the rest of a body that is refused, up to a bound in bytes and in seconds."""
    with trio.move_on_after(DRAIN_S):
        while num_received < DRAIN_BYTES:
            message = await receive()
            num_received += len(message.get("body", b""))
            if not message.get("more_body", False):
                return
