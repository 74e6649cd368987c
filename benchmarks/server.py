"""A server in processes of its own: started, asked until it is ready, held still, measured and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

POLL_S = 0.02
STOP_S = 15.0


class Server:
    """Context manager: running inside the block, and with all its processes gone after it.

    Args:
        command: `{port}` in it stands for the port.
        ready_path: answers 200 once it takes requests.

    Attributes:
        port: a free one of this machine.
        ready_s: from its start to being ready.

    Raises:
        RuntimeError: it ended, or was not ready within *timeout_s*; with the end of its output.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], ready_path: str, timeout_s: float = 600.0
    ) -> None:
        self.port = _free_port()
        self.ready_s = 0.0
        self._command = [word.replace("{port}", str(self.port)) for word in command]
        self._env = {**os.environ, **env}
        self._url = f"http://127.0.0.1:{self.port}{ready_path}"
        self._timeout_s = timeout_s

    def __enter__(self) -> Server:
        self._log = tempfile.TemporaryFile()
        started = time.perf_counter()
        # A session of its own, so that workers it starts can be found and ended with it.
        self._process = subprocess.Popen(
            self._command, env=self._env, stdout=self._log, stderr=self._log, start_new_session=True
        )
        try:
            while not self._ready():
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self._command[0]} ended with {self._process.returncode}: {self._tail()}")
                if time.perf_counter() - started > self._timeout_s:
                    raise RuntimeError(f"{self._command[0]} must be ready in {self._timeout_s:g} s: {self._tail()}")
                time.sleep(POLL_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.ready_s = time.perf_counter() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_on()
        self._send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._send(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def hold(self) -> None:
        """Stop its processes where they are, so that they take no time from others."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `hold`."""
        self._send(signal.SIGCONT)

    def peak_rss_mb(self) -> float:
        """The peaks of resident memory of its processes, added up; what they share counts in each."""
        kib = 0
        for process in _session(self._process.pid):
            try:
                status = (process / "status").read_text()
            except OSError:
                continue
            kib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        return kib * 1024 / 1e6

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._url, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-1500:].decode(errors="replace")


def _session(leader: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # After the command in parentheses: state, parent, group, session.
            session = (process / "stat").read_text().rpartition(")")[2].split()[3]
        except OSError:
            continue
        if int(session) == leader:
            yield process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
