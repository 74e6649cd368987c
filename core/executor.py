"""The executor that was chosen: what it is built with, and what stands between the line and a stranger's.

Start-up, but for `Guarded`, which is called on the loop once a step. Knows neither settings nor channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog

from ..hooks.components import Bound, Component
from ..hooks.errors import PluginError
from ..hooks.messages import Step, StepResult
from ..hooks.protocols import Run, StepHandle
from .compute import Activity, Compute, Runner
from .containment import builtin, describe

log = structlog.get_logger()


def whose(component: Component) -> str:
    """Whose executor it is, in messages: `executor NAME of plugin PLUGIN (distribution version)`."""
    return f"executor {component.name} of plugin {component.plugin}"


class Offer:
    """What `ExecutorContext` has that is more than a number, and what was made of it.

    Args:
        activity: of the compute thread.
        num_threads: of torch, on that thread.
        load: reads the weights; None where the executor does without Headrace's own model.

    Attributes:
        threaded: the executor runs on the compute thread, which watches itself.
        loaded: the weights were read.
    """

    def __init__(
        self, component: Component, activity: Activity, num_threads: int, load: Callable[[], Run] | None
    ) -> None:
        self._component = component
        self._activity = activity
        self._num_threads = num_threads
        self._load = load
        self.threaded = False
        self.loaded = False

    def on_thread(self, run: Run) -> Compute:
        """See `ExecutorContext.on_thread`."""
        self.threaded = True
        # Headrace's own runner says itself when it works.
        watched = run if isinstance(run, Runner) else partial(_watched, run, self._activity)
        give_way = run.give_way if isinstance(run, Runner) else None
        return Compute(watched, num_threads=self._num_threads, give_way=give_way)

    def load(self) -> Run:
        """See `ExecutorContext.load`."""
        if self._load is None:
            raise self._broken("calls Context.executor.load, so its factory must say uses_model = True")
        if self.loaded:
            raise self._broken("must call Context.executor.load once, and calls it again")
        self.loaded = True
        return self._load()

    def check(self, built: Any) -> int | None:
        """What *built* promises beside its protocol.

        Returns:
            How many blocks it holds; None: as many as it was told of.

        Raises:
            PluginError: it breaks a rule.
        """
        if self._load is not None:
            if not self.loaded:
                raise self._broken("says uses_model = True and must call Context.executor.load, and has not")
            return None
        held = getattr(built, "num_blocks", None)
        if held is not None and (type(held) is not int or held < 1):
            raise self._broken(f"must have a whole number above 0 as num_blocks, or none, found {held!r}")
        return held

    def _broken(self, reason: str) -> PluginError:
        plugin = self._component.plugin
        return PluginError(plugin.id, f"executor {self._component.name} {reason}", distribution=plugin.origin)


def _watched(run: Run, activity: Activity, step: Step) -> StepResult:
    activity.enter()
    try:
        return run(step)
    finally:
        activity.leave()


def for_the_line(bound: Bound, offer: Offer, activity: Activity, vocab_size: int) -> Any:
    """What the line enters when it starts: a built-in as it is, a stranger's behind a guard."""
    if builtin(bound):
        return bound.component
    if not offer.threaded:
        activity.place = "the line"
    return Guarded(bound, vocab_size=vocab_size, activity=None if offer.threaded else activity)


class Guarded:
    """A stranger's executor: what it raises names it, and what it gives back is looked at before the line believes it.

    Its failures end the line, as those of the compute thread do: nobody else has the sequences.

    Args:
        vocab_size: token ids must lie below it.
        activity: entered while a step is under way, for the watchdog; None: somebody else does that.
    """

    def __init__(self, bound: Bound, *, vocab_size: int, activity: Activity | None) -> None:
        self._bound = bound
        self._executor = bound.component
        origin = f" ({bound.distribution})" if bound.distribution else ""
        self._who = f"executor {bound.name} of plugin {bound.plugin}{origin}"
        self._vocab_size = vocab_size
        self._activity = activity
        self._num_under_way = 0

    def __enter__(self) -> Guarded:
        enter = getattr(self._executor, "__enter__", None)
        if enter is not None:
            try:
                self._executor = enter()
            except (Exception, SystemExit) as error:
                reason = f"executor {self._bound.name} could not be started: {describe(error)}"
                raise PluginError(self._bound.plugin, reason, distribution=self._bound.distribution) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Not `self._executor`, which may be something else that its `__enter__` gave.
        leave = getattr(self._bound.component, "__exit__", None)
        if leave is not None:
            try:
                leave(*exc_info)
            except (Exception, SystemExit):
                log.exception("an executor failed to end", executor=self._bound.name, plugin=self._bound.plugin)

    def submit(self, step: Step) -> GuardedHandle:
        """Hand on the step.

        Raises:
            RuntimeError: the executor failed; says whose it is and why.
        """
        with self.blamed("submit"):
            handle = self._executor.submit(step)
            if not callable(getattr(handle, "result", None)):
                raise TypeError(f"submit must return a handle with result(), found {type(handle).__name__}")
        self._num_under_way += 1
        if self._num_under_way == 1:
            self._enter()
        return GuardedHandle(self, step, handle)

    def done(self) -> None:
        """A step's result is there; the next one's time begins."""
        self._num_under_way -= 1
        self._enter()

    def check(self, step: Step, result: object) -> StepResult:
        """Raises:
        TypeError, ValueError: *result* is not what became of *step*.
        """
        if not isinstance(result, StepResult):
            raise TypeError(f"it must come to a StepResult, found {type(result).__name__}")
        ids = result.token_ids
        if len(ids) != len(step.sample_slots) or len(result.scores) != len(step.score_rows):
            raise ValueError(
                f"{len(step.sample_slots)} samples and {len(step.score_rows)} scores must come back, "
                f"found {len(ids)} and {len(result.scores)}"
            )
        for i, token_id in enumerate(ids):
            if type(token_id) is not int or not -1 <= token_id < self._vocab_size:
                raise ValueError(f"token ids must be whole numbers below {self._vocab_size}, found {token_id!r}")
            if token_id < 0 and i not in result.errors and step.sample_drafts[i] < 0:
                raise ValueError(f"sample {i} must have a token or an error, found neither")
        return result

    @contextmanager
    def blamed(self, method: str) -> Iterator[None]:
        """What is raised in here is the executor's doing."""
        try:
            yield
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"{self._who} failed in {method}: {describe(error)}") from error

    def _enter(self) -> None:
        if self._activity is None:
            return
        if self._num_under_way:
            self._activity.enter()
        else:
            self._activity.leave()


class GuardedHandle:
    """A step on its way through a stranger's executor."""

    def __init__(self, guard: Guarded, step: Step, handle: StepHandle) -> None:
        self._guard = guard
        self._step = step
        self._handle = handle

    async def result(self) -> StepResult:
        """Wait for the step. Called once, by `sample`.

        Raises:
            RuntimeError: the executor failed; says whose it is and why.
        """
        with self._guard.blamed("result"):
            result = self._guard.check(self._step, await self._handle.result())
        self._guard.done()
        return result
