"""Where the body of an HTTP/1.1 response ends, and what is in it. Receives bytes as they come, however they are cut."""

from __future__ import annotations

from typing import Final, Protocol

MAX_LINE_BYTES: Final = 16384


class WireError(Exception):
    """What came is not what was to come."""


class CutShort(WireError):
    """What came ended before it was complete."""


class Body(Protocol):
    """Where a body ends."""

    complete: bool

    def feed(self, data: bytes) -> bytes:
        """What *data* holds of the body.

        Raises:
            WireError: it breaks the framing.
        """
        ...

    def end(self) -> None:
        """The connection is closed. Raises WireError where more was promised."""
        ...


class Chunked:
    """RFC 9112, section 7.1. Trailers are dropped."""

    def __init__(self) -> None:
        self.complete = False
        self._rest = b""
        self._num_left = 0
        self._in_trailers = False

    def feed(self, data: bytes) -> bytes:
        data, at, pieces = self._rest + data, 0, []
        while not self.complete:
            if self._num_left:
                piece = data[at : at + self._num_left]
                at += len(piece)
                self._num_left -= len(piece)
                pieces.append(piece)
            end = -1 if self._num_left else data.find(b"\n", at)
            if end < 0:
                break
            self._line(data[at:end].strip())
            at = end + 1
        self._rest = data[at:]
        if len(self._rest) > MAX_LINE_BYTES:
            raise WireError("a line between chunks is too long")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if self._in_trailers:
            self.complete = not line
        elif line:  # Else it is the end of a chunk's own line.
            try:
                self._num_left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise WireError(f"the size of a chunk is {line[:20]!r}") from None
            self._in_trailers = self._num_left == 0

    def end(self) -> None:
        raise CutShort("the connection was closed in the middle of the answer")


class Sized:
    """A body of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_left = num_bytes
        self.complete = num_bytes == 0

    def feed(self, data: bytes) -> bytes:
        data = data[: self._num_left]
        self._num_left -= len(data)
        self.complete = self._num_left == 0
        return data

    def end(self) -> None:
        raise CutShort("the connection was closed in the middle of the answer")


class UntilClose:
    """A body that ends with its connection."""

    complete = False

    def feed(self, data: bytes) -> bytes:
        return data

    def end(self) -> None:
        self.complete = True


def framing(status: int, headers: dict[bytes, bytes]) -> Body:
    """How the body of a response is framed; header names are in lower case."""
    if status in (204, 304):
        return Sized(0)
    if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
        return Chunked()
    length = headers.get(b"content-length")
    return UntilClose() if length is None else Sized(int(length))
