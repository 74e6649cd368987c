"""Observer `jsonl`: writes what happened to a file, one JSON object a line, from a thread of its own.

    observers = [{ use = "jsonl", options = { path = "requests.jsonl" } }]

The line never waits for the disk: events go into a bounded queue, and what finds it full is dropped and counted. The
count stands in the next line that is written, as `dropped`. A file that reaches *max_bytes* is renamed to `PATH.1`, in
place of the one before: so at most twice as many lie on the disk. Knows nothing of prompts and answers.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import structlog
from msgspec import Meta, Struct

from ..hooks.decode import Bytes
from ..hooks.errors import ConfigError
from ..hooks.protocols import Context, Event, Register, RequestEnded, StepDone, TokensDelivered
from ..hooks.registry import plugin

headrace_api = 1

CLOSE_S: Final = 5.0
KINDS: Final[dict[type, str]] = {RequestEnded: "request", StepDone: "step", TokensDelivered: "tokens"}

log = structlog.get_logger()


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1)]
    """The file; it is appended to."""
    events: tuple[Literal["request", "step", "tokens"], ...] = ("request",)
    """Which kinds are written: ends of requests, steps, tokens that left."""
    max_bytes: Bytes = Bytes(64 * 1024**2)
    """Size at which the file is put aside and begun anew."""
    max_queue: Annotated[int, Meta(ge=1, le=10**6)] = 4096
    """Events that may wait for the disk."""


class Writer:
    """The thread's side: the file and its size."""

    def __init__(self, options: Options) -> None:
        self._path = Path(options.path)
        self._max_bytes = options.max_bytes
        self._file = self._path.open("ab")
        self._size = self._file.tell()

    def run(self, events: queue.Queue[tuple[float, str, Event, int] | None]) -> None:
        """Write until None comes."""
        encoder = msgspec.json.Encoder()
        broken = False
        while (item := events.get()) is not None:
            try:
                self._write(_line(encoder, *item))
                if events.empty():
                    self._file.flush()
                broken = False
            except Exception as error:  # A full disk, say: the next line may find room.
                if not broken:
                    log.exception("jsonl cannot write", path=str(self._path), error=str(error))
                broken = True
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._size and self._size + len(line) > self._max_bytes:
            self._file.close()
            self._path.replace(f"{self._path}.1")
            self._file = self._path.open("ab")
            self._size = 0
        self._size += self._file.write(line)


class JsonLines:
    """The loop's side: puts events into the queue.

    Attributes:
        num_dropped: events that found the queue full.
    """

    def __init__(self, context: Context, options: Options) -> None:
        try:
            writer = Writer(options)
        except OSError as error:
            raise ConfigError(f"jsonl: path must be a file that can be written, found {error}") from None
        self.num_dropped = 0
        self._told_dropped = 0
        self._kinds = {kind: name for kind, name in KINDS.items() if name in options.events}
        self._events: queue.Queue[tuple[float, str, Event, int] | None] = queue.Queue(options.max_queue)
        thread = threading.Thread(target=writer.run, args=(self._events,), name="jsonl", daemon=True)
        thread.start()
        # Runs when the process ends, too, so that the last lines are written.
        self._finish = weakref.finalize(self, _finish, self._events, thread)

    def on(self, event: Event) -> None:
        """See `protocols.Observer`."""
        name = self._kinds.get(type(event))
        if name is None:
            return
        try:
            self._events.put_nowait((time.time(), name, event, self.num_dropped - self._told_dropped))
        except queue.Full:
            self.num_dropped += 1
        else:
            self._told_dropped = self.num_dropped

    def close(self) -> None:
        """Write what waits, and close the file. Idempotent; takes five seconds at most."""
        self._finish()


def _line(encoder: msgspec.json.Encoder, at: float, name: str, event: Event, num_dropped: int) -> bytes:
    dropped = {"dropped": num_dropped} if num_dropped else {}
    return encoder.encode({"at": at, "event": name, **dropped, **msgspec.structs.asdict(event)}) + b"\n"


def _finish(events: queue.Queue[tuple[float, str, Event, int] | None], thread: threading.Thread) -> None:
    try:
        events.put(None, timeout=CLOSE_S)
    except queue.Full:  # The disk hangs; the thread is a daemon's.
        return
    thread.join(CLOSE_S)


@plugin
def register_observer(register: Register) -> None:
    register("jsonl", JsonLines, config=Options, doc="Write ends of requests to a file, one JSON object a line.")
