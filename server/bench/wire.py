"""HTTP/1.1 for a load generator: what it costs here is taken from the server it measures, on the same machine.

h11 writes requests and reads heads. Bodies are unwrapped in `framing`, and all plain sockets are read after one wait:
in sketches of it, with 32 streams of one event every 20 ms, an event cost 35 µs of CPU this way, 55 with a wait for
each socket, 139 with h11 for bodies too, and 232 with httpx.
"""

from __future__ import annotations

from typing import Final, Protocol
from urllib.parse import urlsplit

import h11
from msgspec import Struct

from ...hooks.errors import StartError
from .framing import Body, Chunked, CutShort, UntilClose, WireError, framing

READ_BYTES: Final = 65536


class Address(Struct, frozen=True, kw_only=True):
    """Where a server listens. *base*: the path before `/v1`, without a slash at its end."""

    host: str
    port: int
    tls: bool
    base: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Raises:
    StartError: *url* is no address of a server.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
    except ValueError:
        raise StartError(f"URL must be the address of a server, such as http://127.0.0.1:8000, got {url}") from None
    return Address(host=parts.hostname, port=port, tls=tls, base=parts.path.rstrip("/").removesuffix("/v1"))


class Sink(Protocol):
    """Where a response goes."""

    def head(self, status: int, content_type: str) -> None: ...
    def body(self, data: bytes) -> None: ...


class Exchange:
    """One request and its response on a connection.

    Attributes:
        begun: something of the response has come.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._http: h11.Connection | None = h11.Connection(h11.CLIENT)
        self._body: Body = Chunked()
        self._keeps_alive = False
        self.begun = False

    @property
    def reusable(self) -> bool:
        """The response is complete, and the connection may serve another request."""
        return self._http is None and self._keeps_alive and self._body.complete

    def request(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
        assert self._http is not None
        out = self._http.send(h11.Request(method=method, target=target, headers=headers))
        out += self._http.send(h11.Data(data=body))
        return out + self._http.send(h11.EndOfMessage())

    def receive(self, data: bytes) -> bool:
        """Take what came, b"" for the end of the connection.

        Returns:
            Whether the response is complete.

        Raises:
            WireError: it is not HTTP, or ends too soon.
        """
        if self._http is not None:
            rest = self._head(self._http, data)
            if rest is None:
                return False
            self._http, data = None, rest
        elif not data:
            self._body.end()
        if data and (text := self._body.feed(data)):
            self._sink.body(text)
        return self._body.complete

    def _head(self, http: h11.Connection, data: bytes) -> bytes | None:
        """What follows the response's head; None until it is there."""
        if not data:
            raise CutShort("the connection was closed before the answer")
        self.begun = True
        try:
            http.receive_data(data)
            event = http.next_event()
            while isinstance(event, h11.InformationalResponse):
                event = http.next_event()
        except h11.RemoteProtocolError as error:
            raise WireError(str(error)) from None
        if not isinstance(event, h11.Response):
            return None
        headers = dict(event.headers)
        self._body = framing(event.status_code, headers)
        closes = b"close" in headers.get(b"connection", b"").lower() or event.http_version == b"1.0"
        self._keeps_alive = not closes and not isinstance(self._body, UntilClose)
        self._sink.head(event.status_code, headers.get(b"content-type", b"").decode("latin-1"))
        return http.trailing_data[0]
