"""A client for OpenAI's streaming chat that costs next to nothing while it measures.

On a machine with few cores the client competes with the server it times. So it only notes when which bytes came, and
reads them when the answer has ended. One connection a request, closed by the server: nothing is kept alive.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import trio

PIECE_BYTES = 1 << 16


class Stream:
    """An answer as it arrives: `times[i]` is when `pieces[i]` came, in `perf_counter()`."""

    def __init__(self, *, tell_after: int = 0) -> None:
        self.sent = 0.0
        self.ended = 0.0
        self.times: list[float] = []
        self.pieces: list[bytes] = []
        self.running = trio.Event()
        """Set once *tell_after* pieces have come."""
        self._tell_after = tell_after

    def took(self, piece: bytes) -> None:
        self.times.append(perf_counter())
        self.pieces.append(piece)
        if len(self.pieces) == self._tell_after:
            self.running.set()


class Answer:
    """What a `Stream` came to.

    Attributes:
        text_times: when each event that carries text came, in `perf_counter()`.
        num_tokens: output tokens by the server's own usage; the number of text events where it reports none.
        counted: whether the server reported them.
        error: what went wrong; None for an answer that came whole.
    """

    def __init__(self, stream: Stream) -> None:
        self.sent = stream.sent
        self.ended = stream.ended
        self.text_times: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.counted = False
        self.error: str | None = None
        raw = b"".join(stream.pieces)
        head, _, _ = raw.partition(b"\r\n\r\n")
        body, raw_ends = _body(raw, len(head) + 4, chunked=b"chunked" in head.lower())
        if not head.startswith(b"HTTP/1.1 200"):
            self.error = (head.split(b"\r\n")[0] + b": " + bytes(body[:300])).decode(errors="replace")
        ends = list(accumulate(map(len, stream.pieces)))
        tokens = None
        for offset, event in _events(body):
            if event.get("error"):
                self.error = str(event["error"])[:300]
            if usage := event.get("usage"):
                tokens = usage.get("completion_tokens")
                self.prompt_tokens = usage.get("prompt_tokens")
                self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if any(_text(choice) for choice in event.get("choices") or ()):
                piece = bisect_left(ends, _raw_offset(offset, raw_ends))
                self.text_times.append(stream.times[min(piece, len(ends) - 1)])
        self.counted = bool(tokens)
        self.num_tokens: int = tokens or len(self.text_times)
        if self.error is None and not self.text_times:
            self.error = "no text came"

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text. A server may put several tokens in one."""
        return [late - early for early, late in pairwise(self.text_times)]


async def ask(port: int, body: Mapping[str, Any], stream: Stream) -> None:
    """Send *body* and fill *stream* until the server closes the connection."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    stream.sent = perf_counter()
    try:
        connection = await trio.open_tcp_stream("127.0.0.1", port)
        async with connection:
            await connection.send_all(head.encode() + data)
            while piece := await connection.receive_some(PIECE_BYTES):
                stream.took(piece)
    except (OSError, trio.BrokenResourceError) as error:
        stream.took(f"HTTP/1.1 000 {error!r}\r\n\r\n".encode() if not stream.pieces else b"")
    finally:
        stream.ended = perf_counter()


def _body(raw: bytes, start: int, *, chunked: bool) -> tuple[bytearray, list[tuple[int, int]]]:
    """The body, and for each chunk where it ends in the body and in *raw*. A body cut short is as long as it is."""
    if not chunked:
        return bytearray(raw[start:]), [(len(raw) - start, len(raw))]
    body, ends = bytearray(), []
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        size = int(raw[start:line_end].split(b";")[0], 16)
        if size == 0:
            break
        start = line_end + 2
        body += raw[start : start + size]
        ends.append((len(body), min(start + size, len(raw))))
        start += size + 2
    return body, ends


def _raw_offset(offset: int, ends: list[tuple[int, int]]) -> int:
    """Where the body's byte before *offset* ends in the raw bytes."""
    body_end, raw_end = ends[min(bisect_left(ends, (offset, 0)), len(ends) - 1)]
    return raw_end - (body_end - offset)


def _events(body: bytearray) -> list[tuple[int, dict[str, Any]]]:
    """Each `data:` line as JSON, and where in the body it ends."""
    events, offset = [], 0
    for line in bytes(body).splitlines(keepends=True):
        offset += len(line)
        data = line.removeprefix(b"data:").strip()
        # The last line of a stream that was cut is no JSON.
        if line.startswith(b"data:") and line.endswith(b"\n") and data.startswith(b"{"):
            events.append((offset, json.loads(data)))
    return events


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or choice.get("text") or ""
