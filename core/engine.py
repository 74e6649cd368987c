"""Opens the channels, starts the actors, supervises them, drains. What the server and a Python program talk to.

    engine = Engine(settings)
    nursery.start_soon(engine.run)                      # loads, then serves until drained
    request = engine.request(prompt, {"temperature": 0})
    await engine.submit(request)
    while (delta := await engine.receive(request)) is not None: ...
    engine.close(request)

A stage that fails takes the line down: every live request hears of it, `state` turns `dead` and `run` raises. The one
exception is `tokenize`, which holds nothing that others need and is restarted.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import structlog
import trio

from ..hooks.errors import BadRequest, EngineDied, RequestError, TimedOut, Unavailable
from ..hooks.messages import (
    Cancel,
    ChatPrompt,
    Delta,
    Drain,
    Logits,
    Prompt,
    Request,
    Sampled,
    Step,
    TextPrompt,
    TokenPrompt,
)
from ..hooks.origins import Where
from ..hooks.protocols import Event, Executor, Observer, RequestEnded
from ..hooks.settings import Settings
from .asked import all_in_use, check_ids, settle
from .batch.planner import Planner
from .channel import Inbox, Outbox, open_channel
from .codec import Codec
from .control import Control
from .credits import Credits
from .forward import forward
from .ingress import ingress
from .mailbox import Mailbox
from .parts import DrainReport, EngineStatistics, ModelInfo, Parts, Progress, quiet
from .sample import sample
from .schedule import MAX_INFLIGHT, Heard, schedule
from .stream import stream
from .timeline import Timeline
from .tokenize import tokenize

TOKENIZE_WORKERS = 2
TOKENIZE_RESTARTS = 5
__all__ = ["DrainReport", "Engine", "EngineStatistics", "ModelInfo", "Parts", "Progress", "plan_memory", "quiet"]

log = structlog.get_logger()


class Engine:
    """The line, from the outside.

    Args:
        observers: hear of steps, tokens and ends of requests, besides the configured ones.
        where: says where a setting comes from, for errors at start.
        parts: ready-made ones, instead of what `core.build` makes of the settings in a worker thread.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        observers: Sequence[Observer] = (),
        where: Callable[[str], Where] | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.state: Literal["loading", "ready", "draining", "dead"] = "loading"
        self.info: ModelInfo | None = None
        self.defaults: Mapping[str, object] = {}
        self.report = ""
        self.ready = trio.Event()
        """Set when the line runs."""
        self._settings = settings
        self._where = where
        self._parts = parts
        self._observers = list(observers)
        self._live: dict[Request, None] = {}
        self._settled = trio.lowlevel.ParkingLot()
        self._num_requests = 0
        self._inboxes: list[Inbox[Any]] = []

    # ── the life of the line ──────────────────────────────────────────────────────────────────────────────────────

    async def run(self, *, progress: Progress | None = None) -> None:
        """Load, then run the line until it has been drained.

        Raises:
            StartError: it cannot start as configured.
            EngineDied: a stage failed. Live requests have been told.
        """
        try:
            parts = self._parts or await self._load(progress)
            await self._run_line(parts)
        except BaseException as error:
            self.state = "dead"
            reason = _reason(error)
            self._tell_all(Unavailable(f"the engine has stopped: {reason}", retry_after_s=10))
            if isinstance(error, BaseExceptionGroup) and (cause := _cause(error)) is not None:
                log.exception("the line failed", reason=reason, exc_info=cause)
                raise EngineDied(reason) from cause
            raise
        self.state = "dead"

    async def _load(self, progress: Progress | None) -> Parts:
        # Threads that spin while they wait for each other stand still together when anything else wants a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from .build import build, no_origin  # Brings torch along, which nobody needs before.

        return await trio.to_thread.run_sync(
            build, self._settings, progress or quiet, self._where or no_origin, abandon_on_cancel=True
        )

    async def _run_line(self, parts: Parts) -> None:
        if self.state == "draining":
            return
        self._open(parts)
        with parts.executor as executor:
            async with trio.open_nursery() as around:
                if parts.watch is not None:
                    around.start_soon(parts.watch, name="watchdog")
                async with trio.open_nursery() as nursery:
                    self._start(nursery, parts, executor)
                    self.state = "ready"
                    self.ready.set()
                around.cancel_scope.cancel()

    def _open(self, parts: Parts) -> None:
        """Open the channels.

        Whoever has a credit may have one prompt and one control message in `schedule`'s inbox. The third place is for
        the message about a request whose credit `tokenize` gave back and that nobody has heard yet.
        """
        line = self._settings.line
        num_places = parts.limits.num_slots
        self.info, self.defaults, self.report = parts.info, parts.defaults, parts.report
        self._stack = parts.stack
        self._observers += [bound.component for bound in parts.stack.observers]
        self._ingress, self._to_ingress = _channel(self, "ingress", num_places, Request)
        self._tokenize, self._to_tokenize = _channel(self, "tokenize", num_places, Request)
        self._schedule, self._to_schedule = _channel(self, "schedule", 3 * num_places + MAX_INFLIGHT + 1, Heard)
        self._forward, self._to_forward = _channel(self, "forward", MAX_INFLIGHT, Step)
        self._sample, self._to_sample = _channel(self, "sample", MAX_INFLIGHT, Logits)
        self._stream, self._to_stream = _channel(self, "stream", MAX_INFLIGHT, Sampled)
        pool_tokens = parts.pool.num_blocks * parts.pool.block_size
        self._credits = Credits(
            max_sequences=num_places,
            max_tokens=line.max_prompt_tokens or max(pool_tokens, num_places * parts.pool.block_size),
        )
        self._codec = Codec(
            parts.stack.tokenizer.component,
            parts.stack.chat_template.component,
            off_loop=parts.codec_off_loop or parts.off_loop,
            max_model_len=parts.limits.max_model_len,
            max_bytes=parts.limits.max_model_len * parts.max_token_bytes,
            vocab_size=parts.info.vocab_size,
        )
        self._control = Control(self._to_schedule.clone(), self._credits)
        self._planner = Planner(
            pool=parts.pool,
            policy=parts.stack.policy.component,
            limits=parts.limits,
            end_ids=parts.end_ids,
            on_retired=self._control.retire,
            clock=trio.current_time,
        )

    def _start(self, nursery: trio.Nursery, parts: Parts, executor: Executor) -> None:
        """Start the six actors, in the order of the line."""

        def start(stage: Callable[..., Any], *channels: object, **rest: object) -> None:
            nursery.start_soon(partial(stage, *channels, **rest), name=getattr(stage, "__name__", None))

        tokenizer = parts.stack.tokenizer.component
        start(ingress, self._ingress, self._to_tokenize, credits=self._credits)
        start(self._keep_tokenizing, self._tokenize, self._to_schedule.clone(), parts=parts)
        start(schedule, self._schedule, self._to_forward, planner=self._planner, control=self._control)
        start(forward, self._forward, self._to_sample, executor=executor)
        start(sample, self._sample, self._to_stream, self._to_schedule.clone(), end_ids=parts.end_ids)
        start(stream, self._stream, tokenizer=tokenizer, tell=self._control.tell, observe=self._observe)

    async def _keep_tokenizing(self, inbox: Inbox[Request], outbox: Outbox[Prompt], *, parts: Parts) -> None:
        """Run `tokenize`; it holds nothing that others need, so a failure is followed by another try."""
        with inbox, outbox:
            for attempt in range(TOKENIZE_RESTARTS + 1):
                try:
                    return await tokenize(
                        inbox.clone(),
                        outbox.clone(),
                        tokenizer=parts.stack.tokenizer.component,
                        template=parts.stack.chat_template.component,
                        credits=self._credits,
                        max_model_len=parts.limits.max_model_len,
                        max_token_bytes=parts.max_token_bytes,
                        vocab_size=parts.info.vocab_size,
                        workers=TOKENIZE_WORKERS,
                        off_loop=parts.off_loop,
                    )
                except Exception:
                    if attempt == TOKENIZE_RESTARTS:
                        raise
                    log.exception("tokenize failed; restarting", attempt=attempt + 1)
                    await trio.sleep(0.05 * 2**attempt)

    async def drain(self, budget_s: float) -> DrainReport:
        """Take no more requests, give the live ones *budget_s* seconds, end the rest with an error, stop the line."""
        num_live = len(self._live)
        if self.state != "dead":
            self.state = "draining"
        with trio.move_on_after(budget_s):
            while self._live:
                await self._settled.park()
        cut = len(self._live)
        self._tell_all(Unavailable("the server is shutting down; ask again elsewhere or later", retry_after_s=10))
        if self.info is not None:
            self._to_ingress.close()
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                self._to_schedule.send_nowait(Drain())
            self._to_schedule.close()
        return DrainReport(finished=num_live - cut, cut=cut)

    def _tell_all(self, error: RequestError) -> None:
        for request in self._live:
            request.mailbox.put(Delta(error=error))
            if self.info is not None:
                self._control.tell(request, Cancel)
        if self.info is not None:
            self._credits.wake()

    # ── the life of a request ─────────────────────────────────────────────────────────────────────────────────────

    def request(
        self,
        prompt: ChatPrompt | TextPrompt | TokenPrompt,
        params: Mapping[str, object],
        *,
        id: str | None = None,
        extra: Mapping[str, Mapping[str, object]] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        tenant: str = "",
    ) -> Request:
        """Check what is asked and make a request of it. `close` it in the end, whatever happens.

        Args:
            params: fields of `SamplingParams`; what is left out comes from the server's defaults.
            extra: parameters of logits processors by name, over those that *params* amount to.
            timeout_s: seconds until the request ends with `TimedOut`.
            patience_s: seconds it may wait at the door for a place in the line.

        Raises:
            BadRequest: names the parameter at fault.
            Unavailable: loading, draining or dead.
        """
        self._require_ready()
        assert self.info is not None
        settled = settle({**self.defaults, **params}, extra or {})
        check_ids(prompt, settled, self.info.vocab_size)
        if settled.n > self._credits.max_sequences:
            raise BadRequest(f"n must be <= {self._credits.max_sequences}, got {settled.n}", param="n")
        chain = self._stack.resolve(settled, extra or {})
        self._num_requests += 1
        now = trio.current_time()
        request = Request(
            id=id or f"req-{secrets.token_hex(12)}",
            prompt=prompt,
            params=settled,
            chain=chain,
            mailbox=Mailbox(max_deltas=self._settings.line.mailbox_deltas, num_choices=settled.n),
            timeline=Timeline(),
            arrival=now,
            lookahead=all_in_use(self._stack, chain, "lookahead", default=True),
            speculate=all_in_use(self._stack, chain, "speculative", default=False),
            priority=priority,
            deadline=math.inf if timeout_s is None else now + timeout_s,
            patience_s=patience_s,
            tenant=tenant,
        )
        self._live[request] = None
        return request

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}; try again later", retry_after_s=5)

    async def submit(self, request: Request) -> None:
        """Let the request in.

        Raises:
            Overloaded: there is no room, and it may not wait or has waited long enough.
            Unavailable: loading, draining or dead.
        """
        self._require_ready()
        if request.patience_s > 0:
            await self._credits.wait_for_room(request)
            try:
                self._require_ready()
            except Unavailable:
                self._credits.release(request)
                raise
            if trio.current_time() >= request.deadline:
                self._credits.release(request)
                raise TimedOut("no place in the line came free within the request's own time")
        mailbox = request.mailbox
        mailbox.attach(partial(self._control.tell, request))
        try:
            self._to_ingress.send_nowait(request)
        except trio.WouldBlock:
            self._credits.release(request)
            request.retired = True
            raise self._credits.refusal() from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Unavailable("the engine has stopped", retry_after_s=10) from None
        await trio.lowlevel.checkpoint()

    async def receive(self, request: Request) -> Delta | None:
        """The next delta, waiting for it; None after the last. One with an error is the last."""
        with trio.move_on_at(request.deadline):
            return await request.mailbox.receive()
        return Delta(error=TimedOut(f"the answer took longer than the {request.deadline - request.arrival:g} s it had"))

    def receive_nowait(self, request: Request) -> Delta | None:
        """The next delta, or None when there is none now."""
        return request.mailbox.receive_nowait()

    def timings(self, request: Request) -> dict[str, object]:
        """Where the request's time went, in milliseconds, up to now."""
        return request.timeline.report()

    def close(self, request: Request, *, status: int = 200, error: str | None = None) -> dict[str, object]:
        """The request is over for its client. Cancels it if it is not over for the line. Idempotent.

        Args:
            status: HTTP status it amounts to; 499 where the client left.

        Returns:
            The same as `timings`, at the end.
        """
        timeline = request.timeline
        if request not in self._live:
            return timeline.report()
        del self._live[request]
        request.mailbox.close()
        timeline.end()
        self._observe(
            RequestEnded(
                id=request.id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=request.num_output_tokens,
                finish=tuple(request.finish),
                states=timeline.states,
                spans=timeline.spans,
                wall_s=timeline.wall_s,
                ttft_s=timeline.since_start("first_token"),
                status=status,
                error=error,
                n=request.params.n,
                max_tokens=request.params.max_tokens,
            )
        )
        report = timeline.report()
        log.info(
            "request",
            id=request.id,
            status=status,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.num_cached_tokens,
            output_tokens=request.num_output_tokens,
            **({} if error is None else {"error": error}),
            **report,
        )
        if not self._live:
            self._settled.unpark_all()
        return report

    # ── around ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def codec(self) -> Codec:
        """The model's tokenizer and template, beside the line.

        Raises:
            Unavailable: loading, draining or dead.
        """
        self._require_ready()
        return self._codec

    @property
    def max_sequences(self) -> int:
        """Choices of all requests that may be in the line at once.

        Raises:
            Unavailable: loading, draining or dead.
        """
        self._require_ready()
        return self._credits.max_sequences

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text (U+FFFD for what is no whole character) and as bytes."""
        data = self._stack.tokenizer.component.token_bytes(token_id)
        return data.decode("utf-8", "replace"), data

    def statistics(self) -> EngineStatistics:
        """Raises:
        Unavailable: still loading.
        """
        if self.info is None:
            raise Unavailable("the engine is loading; try again later", retry_after_s=5)
        planner, counters = self._planner, self._planner.counters
        return EngineStatistics(
            channels=tuple(inbox.statistics() for inbox in self._inboxes),
            running=planner.num_running,
            waiting=planner.num_waiting,
            parked=planner.num_parked,
            blocks_total=planner.pool.num_blocks,
            blocks_used=planner.pool.num_used,
            slots_total=planner.limits.num_slots,
            slots_used=planner.limits.num_slots - planner.num_free_slots,
            preemptions_total=counters["preemptions"],
            steps_total=counters["steps"],
            prompt_tokens_total=counters["prompt_tokens"],
            cached_tokens_total=counters["cached_tokens"],
            generated_tokens_total=counters["generated_tokens"],
            guessed_tokens_total=counters["guessed_tokens"],
            kept_tokens_total=counters["kept_tokens"],
            drafts_total=counters["drafts"],
            kept_by_position=tuple(counters[f"kept_at_{place}"] for place in range(planner.limits.num_guesses)),
        )

    @property
    def num_live(self) -> int:
        """Requests made and not closed."""
        return len(self._live)

    def _observe(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer.on(event)
            except Exception:
                # An observer must not change what it observes. It is dropped, loudly.
                log.exception("observer failed and is dropped", observer=type(observer).__name__)
                self._observers = [other for other in self._observers if other is not observer]


def _channel(engine: Engine, name: str, capacity: int, kind: object) -> tuple[Inbox[Any], Outbox[Any]]:
    outbox: Outbox[Any]
    inbox: Inbox[Any]
    outbox, inbox = open_channel(name, capacity)
    engine._inboxes.append(inbox)
    return inbox, outbox


def plan_memory(settings: Settings, where: Callable[[str], Where] | None = None) -> str:
    """How memory would be used, for people; reads no weights. See `core.build.plan_memory`."""
    from .build import no_origin
    from .build import plan_memory as plan

    return plan(settings, where or no_origin)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The first error in a group that is not a cancellation."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            if (inner := _cause(error)) is not None:
                return inner
        elif isinstance(error, Exception):
            return error
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        error = _cause(error) or error
    return str(error) or type(error).__name__
