"""The one thread that owns the model, its KV cache and the sampling state. Runs steps in step order.

`Runner` is what a step means, in tensors; `Compute` is the thread that runs it and the executor that the line sees. A
step that was submitted is never cancelled: the requests in it are.
"""

from __future__ import annotations

import math
import queue
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter

import outcome
import structlog
import torch
import trio
from torch import Tensor

from ..hooks.messages import UNKNOWN_TOKEN, Step, StepResult
from ..hooks.protocols import Run
from .kernels import Flat, Model
from .sampling import SamplingState, token_scores

MODEL = "the model's own step"

log = structlog.get_logger()


class Activity:
    """What the compute thread is busy with, for a watchdog on another thread.

    Args:
        model: who runs the model's own part of a step, in messages.
        place: what is held up while it does not come back.

    Attributes:
        who: whose code runs.
        since: `time.monotonic()`, or None when it is idle.
    """

    __slots__ = ("model", "place", "since", "who")

    def __init__(self, model: str = MODEL, place: str = "the compute thread") -> None:
        self.model = model
        self.place = place
        self.who = ""
        self.since: float | None = None

    def enter(self, who: str | None = None) -> None:
        """*who*'s code runs from now on; None: the model's own."""
        self.who = self.model if who is None else who
        self.since = monotonic()

    def leave(self) -> None:
        self.since = None


class Sampling:
    """A step's two halves around the forward, for whoever runs it; a `protocols.StepSampling`.

    Args:
        activity: is told that what follows a call is not a plugin's any more.
    """

    def __init__(self, state: SamplingState, activity: Activity) -> None:
        self._state = state
        self._activity = activity

    def begin(self, step: Step) -> array[int]:
        """Run the slot operations, and give the tokens with the ids filled in that only this thread knows yet."""
        if step.slot_ops:
            with self._by_plugins():
                self._state.apply_ops(step.slot_ops)
        token_ids = step.tokens[:]
        # An unknown token is the last of its sequence.
        unknown = [i for i, stop in enumerate(step.cu_tokens[1:]) if token_ids[stop - 1] == UNKNOWN_TOKEN]
        drawn = self._state.last_tokens([step.slots[i] for i in unknown])
        for i, token_id in zip(unknown, drawn, strict=True):
            # A row that failed has drawn none. What comes of it is dropped, but it must be able to run.
            token_ids[step.cu_tokens[i + 1] - 1] = max(token_id, 0)
        return token_ids

    def draw(self, step: Step, logits: Tensor, *, forward_s: float) -> StepResult:
        """Draw the tokens; see `protocols.StepSampling`."""
        started, num_samples = perf_counter(), len(step.sample_rows)
        with self._by_plugins():
            scores = []
            if logits.shape[0] != num_samples:
                scores = token_scores(logits[num_samples:], step.score_tokens.tolist(), step.score_tops.tolist())
                logits = logits[:num_samples]
            draws = self._state.draw(logits, step.sample_slots, step.sample_positions, step.sample_drafts)
        return StepResult(
            token_ids=draws.token_ids,
            logprobs=draws.logprobs,
            errors=draws.errors,
            forward_s=forward_s,
            sample_s=perf_counter() - started,
            scores=scores,
            plugins=draws.plugins,
        )

    @contextmanager
    def _by_plugins(self) -> Iterator[None]:
        """Processors and samplers are called in here, and the activity names them; what follows is not theirs."""
        idle = self._activity.since is None
        try:
            yield
        finally:
            if idle:
                self._activity.leave()
            else:
                self._activity.enter()


class Runner:
    """Runs one step: slot operations, block copies, forward, draw.

    Attributes:
        give_way: see `Compute`; None where the loop has a processor of its own.
    """

    def __init__(
        self,
        model: Model,
        sampling: SamplingState,
        *,
        block_size: int,
        activity: Activity,
        give_way: Callable[[bool], None] | None = None,
    ) -> None:
        self.give_way = give_way
        self._model = model
        self._sampling = Sampling(sampling, activity)
        self._block_size = block_size
        self._activity = activity

    def __call__(self, step: Step) -> StepResult:
        started = perf_counter()
        try:
            self._activity.enter()
            token_ids = self._sampling.begin(step)
            if step.block_copies:
                copies = step.block_copies.tolist()
                self._model.copy_blocks(list(zip(copies[::2], copies[1::2], strict=True)))
            logits = self._model.forward_flat(self._flat(step, token_ids))
            return self._sampling.draw(step, logits, forward_s=perf_counter() - started)
        finally:
            self._activity.leave()

    def _flat(self, step: Step, token_ids: array[int]) -> Flat:
        return Flat(
            token_ids=token_ids,
            positions=step.positions,
            cu_tokens=step.cu_tokens,
            seq_lens=step.seq_lens,
            cu_blocks=step.cu_blocks,
            block_tables=step.block_tables,
            sample_rows=step.sample_rows + step.score_rows,
            block_size=self._block_size,
            num_decodes=step.num_decodes,
        )


class Handle:
    """A step on its way through the compute thread."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self._outcome: outcome.Outcome[StepResult] | None = None

    async def result(self) -> StepResult:
        """Wait for the step; raises what it raised."""
        await self._done.wait()
        assert self._outcome is not None
        return self._outcome.unwrap()

    def finish(self, result: outcome.Outcome[StepResult]) -> None:
        """On the loop: the step is done."""
        self._outcome = result
        self._done.set()


class Courtesy(trio.abc.Instrument):
    """Tells the compute threads when the loop is at work, so that one of them leaves it a processor.

    Else the system takes one for it, in the middle of something that all the others then wait for.
    """

    def __init__(self, give_way: Callable[[bool], None]) -> None:
        self._give_way = give_way
        self._at_work = False

    def before_io_wait(self, timeout: float) -> None:
        """The loop has nothing to do for so many seconds."""
        if timeout > 0:
            self._at_work = False
            self._give_way(False)

    def after_io_wait(self, timeout: float) -> None:
        """The loop goes on. It says so once, for it goes round several times a step."""
        if not self._at_work:
            self._at_work = True
            self._give_way(True)

    def soon(self) -> None:
        """From any thread: the loop will be at work in a moment."""
        self._give_way(True)


class Compute:
    """Executor `thread`: runs steps one after another, in the order of their index.

    Args:
        run: the meaning of a step; only ever called on the thread.
        num_threads: of torch, for one operation; None leaves torch's own choice.
        give_way: told whether the loop is at work; None: nobody has to know.

    Use as a context manager on the loop.
    """

    def __init__(
        self, run: Run, *, num_threads: int | None = None, give_way: Callable[[bool], None] | None = None
    ) -> None:
        self._run = run
        self._courtesy = None if give_way is None else Courtesy(give_way)
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[tuple[Step, Handle] | None] = queue.SimpleQueue()
        self._early: dict[int, tuple[Step, Handle]] = {}
        self._next_index = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._work, name="headrace-compute", daemon=True)

    def __enter__(self) -> Compute:
        self._token = trio.lowlevel.current_trio_token()
        if self._courtesy is not None:
            trio.lowlevel.add_instrument(self._courtesy)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._courtesy is not None:
            trio.lowlevel.remove_instrument(self._courtesy)
            self._courtesy.before_io_wait(math.inf)
        # A call that never returns cannot be interrupted, so nobody waits for it: the process ends without this thread.
        self._jobs.put(None)
        self._thread.join(timeout=1.0)

    def submit(self, step: Step) -> Handle:
        """Take a step. One that comes before its turn waits for those before it."""
        handle = Handle()
        self._early[step.index] = (step, handle)
        while (job := self._early.pop(self._next_index, None)) is not None:
            self._jobs.put(job)
            self._next_index += 1
        return handle

    def _work(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                step, handle = job
                result = outcome.capture(self._run, step)
                if self._courtesy is not None:
                    self._courtesy.soon()
                try:
                    assert self._token is not None
                    self._token.run_sync_soon(handle.finish, result)
                except trio.RunFinishedError:
                    return


async def watch(activity: Activity, *, warn_s: float, stall_s: float, forward_stall_s: float) -> None:
    """Name who keeps the compute thread, within *warn_s*, and give up after the time it may take.

    Args:
        stall_s: how long a plugin's call may take.
        forward_stall_s: how long the model's own step may take.

    Raises:
        TimeoutError: the call has not returned; it cannot be interrupted.
    """
    warned: float | None = None
    woke, awake = monotonic(), 0.0
    while True:
        await trio.sleep(warn_s / 4)
        now = monotonic()
        if now - woke > warn_s:
            awake = now  # The whole process stood still: that time is nobody's.
        woke = now
        since, who = activity.since, activity.who
        busy_s = 0.0 if since is None else now - max(since, awake)
        limit_s = forward_stall_s if who == activity.model else stall_s
        if busy_s > limit_s:
            raise TimeoutError(f"{who} has kept {activity.place} for {busy_s:.1f} s, longer than {limit_s:g} s")
        # The next look would be too late to name it within warn_s.
        if busy_s > 0.75 * warn_s and since != warned:
            warned = since
            log.warning(f"{activity.place} is held up", by=who, seconds=round(busy_s, 1))
