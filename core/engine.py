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

import gc
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Literal

import msgspec
import structlog
import trio

from ..hooks.components import Bound
from ..hooks.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    EngineDied,
    RequestError,
    StartError,
    TimedOut,
    Unavailable,
)
from ..hooks.locks import refuse_locked
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
from ..hooks.origins import Where, no_origin
from ..hooks.params import GREEDY_BELOW
from ..hooks.protocols import Event, Executor, Load, Observer, RequestEnded
from ..hooks.settings import Settings
from ..hooks.stack import Stack, describe_chain
from .admission import admit, release
from .asked import all_in_use, check_ids, settle
from .batch.planner import Planner
from .channel import Inbox, Outbox, open_channel
from .codec import Codec
from .containment import Account, PluginCost, refuse_quarantined
from .control import Control
from .credits import Credits
from .forward import forward
from .ingress import ingress
from .mailbox import Mailbox
from .parts import DrainReport, EngineStatistics, ModelInfo, Parts, Progress, Reloaded, quiet
from .restack import close
from .sample import sample
from .schedule import MAX_INFLIGHT, Heard, schedule
from .steptime import Limits, StepTime
from .stream import stream
from .timeline import Timeline
from .tokenize import tokenize
from .watchers import Watchers

TOKENIZE_WORKERS = 2
TOKENIZE_RESTARTS = 5
__all__ = [
    "DrainReport",
    "Engine",
    "EngineStatistics",
    "Limits",
    "ModelInfo",
    "Parts",
    "PluginCost",
    "Progress",
    "Reloaded",
    "StepTime",
    "measure_steps",
    "plan_memory",
    "quiet",
]

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
        self._own_observers = [(each, Account("observer", "", type(each).__name__)) for each in observers]
        self._observers = self._own_observers
        self._reloading = False
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
        from .build import build  # Brings torch along, which nobody needs before.

        def load() -> Parts:
            parts = build(self._settings, progress or quiet, self._where or no_origin)
            # What loading left behind goes now, and not while somebody waits for a token.
            gc.collect()
            return parts

        return await trio.to_thread.run_sync(load, abandon_on_cancel=True)

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
        self._ledger = parts.ledger
        self._restack = parts.restack
        self._off_loop = parts.codec_off_loop or parts.off_loop
        self._observe_with(parts.stack)
        log.info("order of sampling", chain=describe_chain(parts.stack))
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
            accounts=(
                parts.ledger.account("tokenizer", parts.stack.tokenizer, quarantine=False),
                parts.ledger.account("chat_template", parts.stack.chat_template, quarantine=False),
            ),
            off_loop=self._off_loop,
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
            account=parts.ledger.account("scheduler_policy", parts.stack.policy),
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
        start(
            stream,
            self._stream,
            tokenizer=tokenizer,
            tell=self._control.tell,
            observe=self._observe,
            # Nothing could take the place of the model's own.
            account=parts.ledger.account("tokenizer", parts.stack.tokenizer, quarantine=False),
            watch=partial(Watchers, ledger=parts.ledger),
        )

    async def _keep_tokenizing(self, inbox: Inbox[Request], outbox: Outbox[Prompt], *, parts: Parts) -> None:
        """Run `tokenize`; it holds nothing that others need, so a failure is followed by another try."""
        with inbox, outbox:
            for attempt in range(TOKENIZE_RESTARTS + 1):
                try:
                    return await tokenize(
                        inbox.clone(),
                        outbox.clone(),
                        tokenizer=parts.stack.tokenizer.component,
                        credits=self._credits,
                        max_model_len=parts.limits.max_model_len,
                        max_token_bytes=parts.max_token_bytes,
                        vocab_size=parts.info.vocab_size,
                        workers=TOKENIZE_WORKERS,
                        off_loop=parts.off_loop,
                        ledger=parts.ledger,
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

    # ── another stack ─────────────────────────────────────────────────────────────────────────────────────────────

    async def reload(
        self, settings: Settings | None = None, *, where: Callable[[str], Where] | None = None
    ) -> Reloaded:
        """Build the Stack anew, with new versions of plugins, and answer new requests with it.

        Those that are in the line or at its door stay on the Stack they were resolved on. The scheduler policy and the
        observers change for all.

        Args:
            settings: None: those that hold now.
            where: says where they come from.

        Raises:
            StartError: it cannot be built; lists all that is in the way. Nothing has changed.
            Conflict: another reload is under way, or this line cannot.
            Unavailable: loading, draining or dead.
        """
        self._require_ready()
        if self._restack is None:
            raise Conflict("this line was made of ready parts and cannot be reloaded; start it from settings")
        if self._reloading:
            raise Conflict("another reload is under way; try again when it has ended", code="reload_under_way")
        self._reloading = True
        try:
            after = settings or self._settings
            try:
                made = await self._restack(after, self._settings, where or no_origin, self._working())
            except StartError:
                raise
            except (Exception, SystemExit) as error:  # What is imported anew is a stranger's.
                log.exception("a reload failed")
                raise ConfigError(f"the new stack cannot be built: {type(error).__name__}: {error}") from error
            self._require_ready()
            old, self._settings = self._stack, after
            self._install(made.stack, made.defaults)
            report = Reloaded(
                old=old.fingerprint, new=made.stack.fingerprint, changed=made.changed, plugins=made.plugins
            )
            log.info("reloaded", **msgspec.structs.asdict(report), chain=describe_chain(made.stack))
            kept = {id(bound.component) for bound in made.stack.observers}
            gone = [bound for bound in old.observers if id(bound.component) not in kept]
            if gone:
                await self._off_loop(partial(close, gone))
        finally:
            self._reloading = False
        return report

    def _working(self) -> Stack:
        """The present Stack, of the components that can be taken over: a reload calls again what was in quarantine."""

        def working(slot: str, bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
            return tuple(bound for bound in bounds if self._ledger.account(slot, bound).quarantined is None)

        stack = self._stack
        return msgspec.structs.replace(
            stack,
            admission=working("admission", stack.admission),
            observers=working("observer", stack.observers),
        )

    def _install(self, stack: Stack, defaults: Mapping[str, object]) -> None:
        """All at once, for nobody waits in here: a request is resolved on the one or on the other."""
        assert self.info is not None
        old, self._stack, self.defaults = self._stack, stack, defaults
        self.info = msgspec.structs.replace(self.info, fingerprint=stack.fingerprint)
        template = stack.chat_template
        account = self._ledger.account("chat_template", template, quarantine=False)
        self._codec.follow(template.component, account)
        self._planner.follow(stack.policy.component, self._ledger.account("scheduler_policy", stack.policy))
        self._observe_with(stack)
        live = {request.stack.revision: request.stack for request in self._live if request.stack is not None}
        self._ledger.keep([*live.values(), old, stack])

    def _observe_with(self, stack: Stack) -> None:
        bounds = [(bound.component, self._ledger.account("observer", bound)) for bound in stack.observers]
        self._observers = [*self._own_observers, *bounds]

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
        sampler: Mapping[str, object] | None = None,
        stop: Mapping[str, Mapping[str, object]] | None = None,
    ) -> Request:
        """Check what is asked and make a request of it. `close` it in the end, whatever happens.

        Args:
            params: fields of `SamplingParams`; what is left out comes from the server's defaults.
            extra: parameters of logits processors by name, over those that *params* amount to.
            timeout_s: seconds until the request ends with `TimedOut`.
            patience_s: seconds it may wait at the door for a place in the line.
            sampler: parameters of the sampler.
            stop: parameters of stop watchers by name.

        Raises:
            BadRequest: names the parameter at fault.
            Unavailable: loading, draining or dead; or something that it needs is in quarantine.
        """
        self._require_ready()
        assert self.info is not None
        refuse_locked(self._settings.sampling.locked, params, extra or {}, sampler, stop)
        settled = settle({**self.defaults, **params}, extra or {})
        check_ids(prompt, settled, self.info.vocab_size)
        if settled.n > self._credits.max_sequences:
            raise BadRequest(f"n must be <= {self._credits.max_sequences}, got {settled.n}", param="n")
        chain = self._stack.resolve(settled, extra or {})
        draws = None if settled.temperature < GREEDY_BELOW else self._stack.sampler
        refuse_quarantined(self._ledger, self._stack.processors, chain, draws)
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
            sampler=self._stack.resolve_sampler(sampler),
            stops=self._stack.resolve_stops(stop),
            stack=self._stack,
        )
        self._live[request] = None
        return request

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}; try again later", retry_after_s=5)

    async def submit(self, request: Request) -> None:
        """Let the request in.

        Raises:
            Overloaded: there is no room, and it may not wait or has waited long enough; or it is not admitted.
            Unavailable: loading, draining or dead, or what should admit it failed.
        """
        self._require_ready()
        if request.stack is not None and request.stack.admission:
            await admit(request, request.stack.admission, self._load_now(), self._ledger)
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
        if request.deadline == math.inf:
            return await request.mailbox.receive()
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
        release(request, self._ledger)
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
                endpoint="chat" if isinstance(request.prompt, ChatPrompt) else "completion",
                model="" if self.info is None else self.info.name,
                tenant=request.tenant,
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
            plugins=self._ledger.costs(),
        )

    def _load_now(self) -> Load:
        pool = self._planner.pool
        return Load(
            num_running=self._planner.num_running,
            num_waiting=self._planner.num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_blocks - pool.num_used,
        )

    @property
    def num_live(self) -> int:
        """Requests made and not closed."""
        return len(self._live)

    def _observe(self, event: Event) -> None:
        for observer, account in self._observers:
            started = perf_counter()
            try:
                observer.on(event)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # An observer must not change what it observes. One that fails again and again is dropped, loudly.
                account.spent(perf_counter() - started)
                account.failed(error)
            else:
                account.spent(perf_counter() - started)
                account.worked()
            if account.quarantined is not None:
                self._observers = [each for each in self._observers if each[1] is not account]


def _channel(engine: Engine, name: str, capacity: int, kind: object) -> tuple[Inbox[Any], Outbox[Any]]:
    outbox: Outbox[Any]
    inbox: Inbox[Any]
    outbox, inbox = open_channel(name, capacity)
    engine._inboxes.append(inbox)
    return inbox, outbox


def plan_memory(settings: Settings, where: Callable[[str], Where] | None = None) -> str:
    """How memory would be used, for people; reads no weights. See `core.opened.plan_memory`."""
    from .opened import plan_memory as plan

    return plan(settings, where or no_origin)


def measure_steps(
    settings: Settings, progress: Progress, where: Callable[[str], Where] | None = None, **asked: Any
) -> Iterator[Limits | StepTime]:
    """Time steps of the model alone. See `core.steps.measure_steps`."""
    from .steps import measure_steps as measure

    return measure(settings, progress, where or no_origin, **asked)


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
