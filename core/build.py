"""From settings to the parts of a line: find plugins, open the checkpoint, plan memory, load weights, freeze the stack.

Start-up only; runs in a worker thread. Everything it chooses goes through the registry, the built-ins too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog
import trio
from msgspec import Struct

from ..hooks.chain import build_sampling
from ..hooks.decode import Use
from ..hooks.errors import ConfigError, MemoryPlanError, ModelError
from ..hooks.origins import Where
from ..hooks.program import Checkpoint, Linear, Program
from ..hooks.protocols import Architecture, Context, Executor, SamplingContext
from ..hooks.registry import Registry
from ..hooks.settings import Settings
from ..hooks.stack import Stack, freeze
from .batch.planner import Limits
from .compute import Activity, Compute, Runner, watch
from .kv.blocks import BlockPool
from .kv.memory import available_memory
from .kv.plan import MemoryPlan, estimate_step_bytes, kv_bytes_per_token, plan
from .model.load import load, resolve, weight_bytes
from .parts import ModelInfo, Parts, Progress
from .sampling import SamplingState

FLOAT32_BYTES = 4
FORWARD_STALL = 10
"""A step of a large model may take long; it hangs when it takes this many times what a plugin may."""

log = structlog.get_logger()
WhereOf = Callable[[str], Where]


class Opened(Struct, frozen=True, kw_only=True):
    """A model that is known but not loaded."""

    registry: Registry
    context: Context
    checkpoint: Checkpoint
    architecture: Architecture
    program: Program
    memory: MemoryPlan
    max_model_len: int


def no_origin(key: str) -> Where:
    """Where a setting comes from, for those who do not know."""
    return Where(tuple(key.split(".")))


def build(settings: Settings, progress: Progress, where: WhereOf = no_origin) -> Parts:
    """Load the model and everything around it.

    Raises:
        StartError: what is wrong, for the operator.
    """
    opened = open_model(settings, progress, where)
    checkpoint, line = opened.checkpoint, settings.line
    num_slots = line.max_running + line.max_waiting
    stack = _build_stack(opened, settings, num_slots, where)
    tokenizer = stack.tokenizer.component
    activity = Activity()
    runner = _build_runner(opened, settings, stack, num_slots, activity, progress, where)
    defaults = _defaults(settings, checkpoint)
    checkpoint.close()
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
        pool=BlockPool(opened.memory.num_blocks, opened.memory.block_size),
        limits=Limits(
            max_running=line.max_running,
            max_step_tokens=line.max_step_tokens,
            max_model_len=opened.max_model_len,
            num_slots=num_slots,
            prefix_cache=line.prefix_cache,
            target_step_s=line.target_step_s,
            num_guesses=line.guesses,
            park_timeout_s=line.park_timeout_s,
        ),
        executor=_on_thread(runner, settings.model.threads or len(os.sched_getaffinity(0))),
        end_ids=tokenizer.end_ids,
        max_token_bytes=max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.num_tokens)),
        defaults=defaults,
        off_loop=partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(2)),
        codec_off_loop=partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1)),
        watch=partial(
            watch,
            activity,
            warn_s=line.watchdog_s,
            stall_s=line.plugin_stall_s,
            forward_stall_s=FORWARD_STALL * line.plugin_stall_s,
        ),
        report=opened.memory.describe(),
    )


def _build_stack(opened: Opened, settings: Settings, num_slots: int, where: WhereOf) -> Stack:
    """What stands between a request and its tokens. Later parts find the earlier ones in the context."""
    registry, context = opened.registry, opened.context
    tokenizer = registry.build("tokenizer", settings.model.tokenizer, context, where("model.tokenizer"))
    context.tokenizer = tokenizer.component
    template = registry.build("chat_template", settings.model.chat_template, context, where("model.chat_template"))
    context.sampling = SamplingContext(vocab_size=opened.program.vocab_size, num_slots=num_slots)
    chain, sampler = build_sampling(registry, settings.sampling, context, where("sampling"))
    return freeze(
        tokenizer=tokenizer,
        chat_template=template,
        policy=registry.build("scheduler_policy", settings.line.policy, context, where("line.policy")),
        chain=chain,
        sampler=sampler,
        observers=tuple(
            registry.build("observer", use, context, where("observers") / index)
            for index, use in enumerate(settings.observers)
        ),
    )


def _build_runner(
    opened: Opened,
    settings: Settings,
    stack: Stack,
    num_slots: int,
    activity: Activity,
    progress: Progress,
    where: WhereOf,
) -> Runner:
    """The model with its weights and KV cache, and the sampling state beside it."""

    def component(slot: str, use: Use, key: str) -> Any:
        return opened.registry.build(slot, use, opened.context, where(key)).component

    model = load(
        opened.checkpoint.artifact,
        opened.checkpoint,
        opened.architecture,
        component("quantizer", settings.model.quantizer, "model.quantizer"),
        component("attention", settings.model.attention, "model.attention"),
        num_blocks=opened.memory.num_blocks + 1,
        block_size=opened.memory.block_size,
        progress=progress,
    )
    sampling = SamplingState(
        num_slots=num_slots,
        vocab_size=opened.program.vocab_size,
        chain=[group for _, group in stack.chain],
        sampler=stack.sampler,
        on_call=activity.enter,
    )
    return Runner(model, sampling, block_size=opened.memory.block_size, activity=activity)


def open_model(settings: Settings, progress: Progress, where: WhereOf = no_origin) -> Opened:
    """Everything that can be known without reading weights."""
    plugins = settings.plugins
    registry = Registry.discover(
        disable=plugins.disable, allow=plugins.allow, strict=plugins.strict, where=where("plugins")
    )
    for info in registry.report():
        if info.state == "failed":
            log.warning("plugin failed to load", plugin=str(info), reason=info.reason)
    context = Context()
    sources = {component.name: component.build(context).component for component in registry.offered("model_source")}
    artifact = resolve(settings.model.uri, sources, progress)
    loader = registry.build("weight_loader", Use(use=artifact.kind), context).component
    checkpoint: Checkpoint = loader.open(artifact)
    context.checkpoint = checkpoint
    architecture = _architecture(registry, settings, checkpoint, where)
    program = architecture.program(checkpoint)
    max_model_len = _max_model_len(settings, program, where)
    return Opened(
        registry=registry,
        context=context,
        checkpoint=checkpoint,
        architecture=architecture,
        program=program,
        memory=_plan(settings, program, max_model_len),
        max_model_len=max_model_len,
    )


def plan_memory(settings: Settings, where: WhereOf = no_origin) -> str:
    """The memory plan, for people. Reads no weights, so the peak of a step is an estimate."""
    opened = open_model(settings, lambda what, done, total: None, where)
    opened.checkpoint.close()
    return f"{opened.checkpoint.artifact.name} ({opened.checkpoint.architecture})\n{opened.memory.describe()}"


def _architecture(registry: Registry, settings: Settings, checkpoint: Checkpoint, where: WhereOf) -> Architecture:
    name = settings.model.architecture or checkpoint.architecture
    known = sorted(component.name for component in registry.offered("architecture"))
    if not settings.model.architecture and name not in known:
        raise ModelError(
            f"{checkpoint.artifact.path}: no plugin knows the architecture {name!r}; there are {', '.join(known)}; "
            "install a plugin that has it, or name one of these in model.architecture"
        )
    use = Use(use=name)
    return registry.build("architecture", use, Context(), where("model.architecture")).component  # type: ignore[no-any-return]


def _max_model_len(settings: Settings, program: Program, where: WhereOf) -> int:
    asked = settings.model.max_model_len
    if asked is not None and asked > program.max_positions:
        raise ConfigError(
            f"{where('model.max_model_len')}: must be <= {program.max_positions}, what the model was trained for, "
            f"got {asked}"
        )
    return asked or program.max_positions


def _plan(settings: Settings, program: Program, max_model_len: int) -> MemoryPlan:
    line = settings.line
    widest = max((program.weights[op.weight].shape[0] for op in program.ops if isinstance(op, Linear)), default=0)
    max_len = max_model_len
    try:
        return plan(
            available_bytes=available_memory(),
            weight_bytes=weight_bytes(program),
            step_bytes=estimate_step_bytes(
                hidden_size=program.hidden_size,
                intermediate_size=widest,
                vocab_size=program.vocab_size,
                num_heads=program.num_heads,
                num_kv_heads=program.num_kv_heads,
                head_dim=program.head_dim,
                max_step_tokens=line.max_step_tokens,
                max_running=line.max_running,
                max_model_len=max_len,
            ),
            step_measured=False,
            bytes_per_token=kv_bytes_per_token(
                num_layers=program.num_layers,
                num_kv_heads=program.num_kv_heads,
                head_dim=program.head_dim,
                dtype_bytes=FLOAT32_BYTES,
            ),
            max_model_len=max_len,
            max_running=line.max_running,
            block_size=line.block_size,
            kv_memory=line.kv_memory,
            kv_blocks=line.kv_blocks,
            headroom=line.memory_headroom,
        )
    except MemoryPlanError as error:
        raise MemoryPlanError(f"{settings.model.uri}: {error}") from error


def _defaults(settings: Settings, checkpoint: Checkpoint) -> Mapping[str, object]:
    """Sampling parameters of requests that do not set them: the checkpoint's under the operator's."""
    generation = checkpoint.generation if settings.model.use_generation_config else {}
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults = {name: generation[name] for name in known if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    return {**defaults, **settings.sampling.defaults}


@contextmanager
def _on_thread(runner: Runner, threads: int) -> Iterator[Executor]:
    with Compute(runner, num_threads=threads) as compute:
        yield compute
