"""The life of the server process: bind, load, serve, drain, end.

The port is bound before the model loads, so that an occupied one is found at once and `/health` can say "loading". The
engine's life decides: when it has drained, the server ends well; when it has died, the clients are told and the error
goes to the caller.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import hypercorn.trio
import structlog
import trio

from ..hooks.config import Server
from ..hooks.errors import StartError
from . import limits
from .app import create_app
from .extensions import NOTHING, Extensions
from .hardening import WriteLimit, install
from .logs import HypercornLog

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

    from ..core.engine import Engine
    from ..hooks.registry import Bound
    from .metrics import Metrics
    from .reload import Reload

# After the drain budget, what the last events need to leave; connections that are still open then are cut.
LAST_WORDS_S: Final = 0.5
# After that, a process that has not ended by itself is stuck.
STUCK_AFTER_S: Final = 5.0
BACKLOG: Final = 512
# Bounds what the kernel takes from us for a client that does not read. The kernel doubles it.
SEND_BUFFER_BYTES: Final = 64 * 1024
DEFAULTS: Final = Server()

log = structlog.get_logger()


def listen(host: str, port: int, *, write_timeout_s: float) -> socket.socket:
    """Bind the port, without accepting connections yet.

    Args:
        port: 0 takes a free one.
        write_timeout_s: the kernel gives up connections whose peer acknowledges nothing for so long; this finds
            vanished peers, and is inherited by accepted sockets.

    Raises:
        StartError: the address is in use, not ours, or no address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"server.host must be an address of this machine, got {host}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(write_timeout_s * 1000)))
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {host} is in use: stop its owner, or choose another with --port"
            raise StartError(reason) from None
        raise StartError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return sock


def url(sock: socket.socket) -> str:
    """Where a client reaches *sock*."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    engine: Engine,
    sock: socket.socket,
    settings: Server,
    *,
    metrics: Metrics,
    auth: Bound | None = None,
    extensions: Extensions = NOTHING,
    reload: Reload | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    ready: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until SIGTERM or SIGINT and the drain that follows; a second signal cuts what is left.

    Args:
        sock: from `listen`; taken over.
        auth: who decides who asks; None: everybody may.
        extensions: what plugins add.
        reload: has the engine serve by the configuration as it is then; on SIGHUP, too. None: nothing has.
        ready: called when the model is loaded.
        task_status: started when connections are accepted.

    Raises:
        StartError: the engine cannot start.
        EngineDied: it has died; live requests have been told.
    """
    install()
    limits.install()
    writes = WriteLimit(settings.write_timeout_s)
    app = create_app(
        engine,
        metrics,
        max_body_bytes=settings.max_body_bytes,
        ping_s=settings.ping_s,
        cors_origins=settings.cors_origins,
        auth=auth,
        open_routes=settings.open_routes,
        extensions=extensions,
        reload=reload,
        max_headers=settings.max_headers,
        max_header_bytes=settings.max_header_bytes,
    )
    stop = trio.Event()
    failure: Exception | None = None
    running = trio.CancelScope()
    with Watchdog() as watchdog:
        async with trio.open_nursery() as helpers:
            helpers.start_soon(_drain_on_signal, engine, writes, watchdog, settings.drain_s, running)
            if reload is not None:
                helpers.start_soon(reload.on_hangup)
            helpers.start_soon(_when_ready, engine, ready, running)
            async with trio.open_nursery() as nursery:
                config = hypercorn_config(sock, writes, settings)
                framework = cast("ASGIFramework", app)
                await nursery.start(partial(hypercorn.trio.serve, framework, config, shutdown_trigger=stop.wait))
                task_status.started()
                try:
                    with running:
                        await engine.run(progress=progress)
                except Exception as error:
                    failure = error
                # Idle connections close at once, busy ones have LAST_WORDS_S.
                writes.cut(trio.current_time() + LAST_WORDS_S)
                stop.set()
            helpers.cancel_scope.cancel()
    if failure is not None:
        raise failure


def hypercorn_config(sock: socket.socket, writes: WriteLimit, settings: Server = DEFAULTS) -> limits.LimitedConfig:
    """Hypercorn's settings, as far as its defaults do not suit a server of long streams."""
    config = limits.LimitedConfig()
    config.writes = writes
    config.connections = limits.ConnectionLimit(settings.max_connections)
    config.h11_max_incomplete_size = settings.max_header_bytes
    config.h2_max_header_list_size = settings.max_header_bytes
    config.bind = [f"fd://{sock.detach()}"]
    config.backlog = BACKLOG
    config.logger_class = HypercornLog
    config.graceful_timeout = LAST_WORDS_S
    config.include_server_header = False
    config.keep_alive_timeout = 75.0  # Longer than proxies keep theirs.
    config.keep_alive_max_requests = 1_000_000
    config.ssl_handshake_timeout = 10.0
    config.websocket_max_message_size = 1024 * 1024
    # read_timeout stays None: it would end streams, whose clients send nothing.
    return config


class Watchdog:
    """Ends the process when it does not end by itself."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def start(self, seconds: float) -> None:
        """Allow *seconds* from now."""
        threading.Thread(target=self._watch, args=(seconds,), name="watchdog", daemon=True).start()

    def _watch(self, seconds: float) -> None:
        if not self._ended.wait(seconds):
            sys.stderr.write(f"headrace: still not stopped after {seconds:g} s, giving up\n")
            os._exit(1)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()


async def _drain_on_signal(
    engine: Engine, writes: WriteLimit, watchdog: Watchdog, budget_s: float, running: trio.CancelScope
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        await anext(signals)
        log.info("draining", budget_s=budget_s)
        watchdog.start(budget_s + LAST_WORDS_S + STUCK_AFTER_S)
        writes.cut(trio.current_time() + budget_s + LAST_WORDS_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drain_at_once_on_signal, engine, writes, signals, nursery.cancel_scope)
            await _drain(engine, budget_s)
            nursery.cancel_scope.cancel()
        if not engine.ready.is_set():
            running.cancel()  # An engine that has not begun has nothing to finish, and would begin yet.


async def _drain_at_once_on_signal(
    engine: Engine, writes: WriteLimit, signals: AsyncIterator[int], first: trio.CancelScope
) -> None:
    await anext(signals)
    first.cancel()
    with trio.CancelScope(shield=True):
        writes.cut(trio.current_time() + LAST_WORDS_S)
        await _drain(engine, 0.0)


async def _drain(engine: Engine, budget_s: float) -> None:
    report = await engine.drain(budget_s)
    log.info("drained", finished=report.finished, cut=report.cut)


async def _when_ready(engine: Engine, ready: Callable[[], None] | None, running: trio.CancelScope) -> None:
    await engine.ready.wait()
    # What is there now stays. Looking through it for garbage again and again would halt every stream for a tenth of a
    # second each time.
    gc.freeze()
    try:
        if ready is not None and not running.cancel_called:
            ready()
        await trio.sleep_forever()
    finally:
        gc.unfreeze()
