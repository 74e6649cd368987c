"""Log lines on standard error, for people or for machines, and Hypercorn's among them."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from typing import Any, Literal, TextIO, cast

import hypercorn.config
import hypercorn.logging
import msgspec
import structlog


class _Stderr:
    """Standard error. A line that cannot be written is lost: no request may end because of one."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def configure(format: Literal["auto", "console", "json"], level: Literal["debug", "info", "warning", "error"]) -> bool:
    """Set structlog up for the process.

    Returns:
        Whether the lines are for people.
    """
    terminal = sys.stderr.isatty()
    for_people = format == "console" or (format == "auto" and terminal)
    processors: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if for_people:
        # The default formatter shows local variables: slow, and prompts are nobody's business.
        formatter = structlog.dev.plain_traceback
        processors.append(structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=formatter))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Stderr())),
    )
    return for_people


class HypercornLog(hypercorn.logging.Logger):
    """What Hypercorn has to say, through structlog. Requests are logged by the engine, which knows more of them."""

    def __init__(self, config: hypercorn.config.Config) -> None:
        self._log = structlog.get_logger(component="hypercorn")

    async def access(self, request: Any, response: Any, request_time: float) -> None:
        """Nothing."""

    async def critical(self, message: str, *args: Any, **kwargs: Any) -> None:
        self._log.critical(_filled(message, args), **kwargs)

    async def error(self, message: str, *args: Any, **kwargs: Any) -> None:
        self._log.error(_filled(message, args), **kwargs)

    async def warning(self, message: str, *args: Any, **kwargs: Any) -> None:
        self._log.warning(_filled(message, args), **kwargs)

    async def info(self, message: str, *args: Any, **kwargs: Any) -> None:
        # "Running on …", which is said better elsewhere.
        self._log.debug(_filled(message, args), **kwargs)

    async def debug(self, message: str, *args: Any, **kwargs: Any) -> None:
        self._log.debug(_filled(message, args), **kwargs)

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        self._log.exception(_filled(message, args), **kwargs)

    async def log(self, level: int, message: str, *args: Any, **kwargs: Any) -> None:
        self._log.log(level, _filled(message, args), **kwargs)


def _filled(message: str, args: tuple[Any, ...]) -> str:
    return message % args if args else message


def _to_json(event: Any, **_: Any) -> str:
    try:
        return msgspec.json.encode(event, enc_hook=repr).decode()
    except UnicodeEncodeError:
        return json.dumps(event, default=repr)  # Half a surrogate pair stays escaped.
