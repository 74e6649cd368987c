"""From settings to the parts of a line: open the model, load weights, freeze the stack, build the executor.

Start-up only; runs in a worker thread. Everything it chooses goes through the registry, the built-ins too.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial

import msgspec
import trio
from msgspec import Struct

from ..hooks.discovery import builtin
from ..hooks.origins import no_origin
from ..hooks.protocols import (
    Executor,
    ExecutorContext,
    SamplingContext,
)
from ..hooks.reimport import Code
from ..hooks.settings import Settings
from ..hooks.stack import Stack
from .batch.planner import Limits
from .compute import MODEL, Activity, Runner, Sampling, watch
from .containment import Ledger
from .cpus import usable_cpus
from .executor import Offer, for_the_line, whose
from .kernels.native.model import NativeModel
from .kernels.reference import ReferenceModel
from .kv.blocks import BlockPool
from .kv.plan import BlockPlan, MemoryPlan
from .opened import Opened, WhereOf, block_plan, load_model, open_model
from .parts import ModelInfo, Parts, Progress, Restacked, RestackOffLoop
from .restack import Restack, build_stack, default_params
from .sampling import SamplingState

FORWARD_STALL = 10
"""A step of a large model may take long; it hangs when it takes this many times what a plugin may."""


def build(settings: Settings, progress: Progress, where: WhereOf = no_origin) -> Parts:
    """Load the model and everything around it.

    Raises:
        StartError: what is wrong, for the operator.
    """
    opened = open_model(settings, progress, where)
    checkpoint, line = opened.checkpoint, settings.line
    num_slots = line.max_running + line.max_waiting
    registry, context, code = opened.registry, opened.context, Code()
    context.sampling = SamplingContext(vocab_size=opened.program.vocab_size, num_slots=num_slots)
    chosen = registry.build("tokenizer", settings.model.tokenizer, context, where("model.tokenizer"))
    tokenizer = context.tokenizer = chosen.component
    defaults = default_params(settings, checkpoint.generation)
    stack = build_stack(registry, context, settings, where, chosen, code, defaults=defaults)
    ledger = Ledger(quarantine_after=settings.plugins.quarantine_after, slow_call_s=settings.plugins.slow_call_s)
    running = _build_executor(opened, settings, stack, num_slots, ledger, progress, where)
    memory = running.memory
    checkpoint.close()
    num_ready = None if running.model is None else running.model.make_ready()
    return Parts(
        info=ModelInfo(
            name=settings.model.name or checkpoint.artifact.name,
            max_model_len=opened.max_model_len,
            vocab_size=opened.program.vocab_size,
            created=int(time.time()),
            fingerprint=stack.fingerprint,
            aliases=settings.model.aliases,
        ),
        stack=stack,
        pool=BlockPool(memory.num_blocks, memory.block_size, num_ready),
        limits=Limits(
            max_running=line.max_running,
            max_step_tokens=line.max_step_tokens,
            max_model_len=opened.max_model_len,
            num_slots=num_slots,
            prefix_cache=line.prefix_cache,
            target_step_s=line.target_step_s,
            max_pause=line.max_pause,
            start_pause_s=line.start_pause_s,
            num_guesses=line.guesses,
            park_timeout_s=line.park_timeout_s,
        ),
        executor=running.executor,
        end_ids=tokenizer.end_ids,
        max_token_bytes=max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.num_tokens)),
        defaults=defaults,
        off_loop=partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(2)),
        codec_off_loop=partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1)),
        watch=partial(
            watch,
            running.activity,
            warn_s=line.watchdog_s,
            stall_s=line.plugin_stall_s,
            forward_stall_s=FORWARD_STALL * line.plugin_stall_s,
        ),
        report=running.report,
        ledger=ledger,
        restack=_off_loop(Restack(context, chosen, checkpoint.generation, code)),
    )


def _off_loop(restack: Restack) -> RestackOffLoop:
    limiter = trio.CapacityLimiter(1)

    async def run(settings: Settings, before: Settings, where: WhereOf, old: Stack, /) -> Restacked:
        return await trio.to_thread.run_sync(restack, settings, before, where, old, limiter=limiter)

    return run


class Running(Struct, frozen=True, kw_only=True):
    """What runs the steps, and what is known once it is there.

    Attributes:
        executor: entered on the loop when the line starts.
        activity: for the watchdog.
        report: the plan, for people.
        model: Headrace's own where it is compiled; None: another one, or another way of running it.
    """

    executor: AbstractContextManager[Executor]
    activity: Activity
    memory: MemoryPlan | BlockPlan
    report: str
    model: NativeModel | None


def _build_executor(
    opened: Opened,
    settings: Settings,
    stack: Stack,
    num_slots: int,
    ledger: Ledger,
    progress: Progress,
    where: WhereOf,
) -> Running:
    """The executor that was chosen; with the model's weights and KV cache, where it runs Headrace's own."""
    component, memory, line = opened.executor, opened.memory, settings.line
    own = opened.quantizer is not None
    activity = Activity(MODEL if builtin(component.plugin) else whose(component))
    sampling = partial(
        SamplingState,
        num_slots=num_slots,
        vocab_size=opened.program.vocab_size,
        chain=[group for _, group in stack.chain],
        sampler=stack.sampler,
        on_call=activity.enter,
        ledger=ledger,
    )
    kernels, native = "", None

    def load_runner() -> Runner:
        nonlocal kernels, native
        model = load_model(opened, settings, progress)
        kernels = f"\n{_describe(model)}"
        native = model if isinstance(model, NativeModel) else None
        state = sampling(drawer=native.drawer if native else None)
        crowded = 1 < usable_cpus() <= num_threads
        give_way = native.give_way if native and crowded else None
        return Runner(model, state, block_size=memory.block_size, activity=activity, give_way=give_way)

    num_threads = settings.model.threads or usable_cpus()
    offer = Offer(component, activity, num_threads, load_runner if own else None)
    context = msgspec.structs.replace(opened.context)
    context.executor = ExecutorContext(
        num_slots=num_slots,
        max_running=line.max_running,
        max_step_tokens=line.max_step_tokens,
        max_model_len=opened.max_model_len,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        vocab_size=opened.program.vocab_size,
        on_thread=offer.on_thread,
        sampling=None if own else Sampling(sampling(), activity),
        load=offer.load,
    )
    bound = component.build(context, line.executor.options, where("line.executor") / "options")
    held = offer.check(bound.component)
    if not own:
        memory = block_plan(settings, opened.max_model_len, context.executor.num_blocks if held is None else held)
    return Running(
        executor=for_the_line(bound, offer, activity, opened.program.vocab_size),
        activity=activity,
        memory=memory,
        report=msgspec.structs.replace(opened, memory=memory).describe() + kernels,
        model=native,
    )


def _describe(model: ReferenceModel | NativeModel) -> str:
    """What runs the model, as a line of the plan; what torch does between compiled segments is named and counted."""
    if not isinstance(model, NativeModel):
        return f"{'kernels':<16}  reference: torch, one operation at a time"
    breaks = ", ".join(f"{count} {name}" for name, count in model.breaks.items())
    return f"{'kernels':<16}  {model.dialect}" + (f", with torch in between: {breaks}" if breaks else "")
