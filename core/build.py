"""From settings to the parts of a line: find plugins, open the checkpoint, plan memory, load weights, freeze the stack.

Start-up only; runs in a worker thread. Everything it chooses goes through the registry, the built-ins too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import msgspec
import trio
from msgspec import Struct

from ..hooks.choices import idle, uses_model
from ..hooks.components import Component
from ..hooks.decode import Use
from ..hooks.discovery import builtin
from ..hooks.errors import ConfigError, MemoryPlanError, ModelError
from ..hooks.origins import Where, no_origin
from ..hooks.program import Checkpoint, Linear, Program
from ..hooks.protocols import (
    Architecture,
    Attention,
    Context,
    Executor,
    ExecutorContext,
    Quantizer,
    SamplingContext,
)
from ..hooks.registry import Registry
from ..hooks.reimport import Code
from ..hooks.settings import Settings
from ..hooks.stack import Stack
from .batch.planner import Limits
from .compute import MODEL, Activity, Runner, Sampling, watch
from .containment import Ledger
from .cpus import usable_cpus
from .executor import Offer, for_the_line, whose
from .kernels.native import dialect
from .kernels.native.model import NativeModel
from .kernels.reference import ReferenceModel
from .kv.blocks import BlockPool
from .kv.memory import available_memory
from .kv.plan import BlockPlan, MemoryPlan, estimate_step_bytes, kv_bytes_per_token, plan, plan_blocks
from .model.load import load, resolve, weight_bytes
from .parts import ModelInfo, Parts, Progress, Restacked, RestackOffLoop
from .restack import Restack, build_stack, default_params, discover
from .sampling import SamplingState

KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
FORWARD_STALL = 10
"""A step of a large model may take long; it hangs when it takes this many times what a plugin may."""

WhereOf = Callable[[str], Where]


class Opened(Struct, frozen=True, kw_only=True):
    """A model that is known but not loaded.

    Attributes:
        executor: what will run the steps.
        quantizer, attention: of Headrace's own model; None where the executor does without it.
    """

    registry: Registry
    context: Context
    checkpoint: Checkpoint
    architecture: Architecture
    program: Program
    executor: Component
    quantizer: Quantizer | None
    attention: Attention | None
    memory: MemoryPlan | BlockPlan
    max_model_len: int

    def describe(self) -> str:
        """Lines for people: who runs the steps, where that is not Headrace by itself, and the memory plan."""
        if builtin(self.executor.plugin):
            return self.memory.describe()
        parts = (
            "Headrace's own model" if self.quantizer is not None else "weights, KV cache and their memory are its own"
        )
        return f"{'executor':<16}  {whose(self.executor).removeprefix('executor ')}: {parts}\n{self.memory.describe()}"


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
        pool=BlockPool(memory.num_blocks, memory.block_size),
        limits=Limits(
            max_running=line.max_running,
            max_step_tokens=line.max_step_tokens,
            max_model_len=opened.max_model_len,
            num_slots=num_slots,
            prefix_cache=line.prefix_cache,
            target_step_s=line.target_step_s,
            max_pause=line.max_pause,
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
    """

    executor: AbstractContextManager[Executor]
    activity: Activity
    memory: MemoryPlan | BlockPlan
    report: str


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
    kernels = ""

    def load_runner() -> Runner:
        nonlocal kernels
        model = load_model(opened, settings, progress)
        kernels = f"\n{_describe(model)}"
        state = sampling(drawer=model.drawer if isinstance(model, NativeModel) else None)
        crowded = 1 < usable_cpus() <= num_threads
        give_way = model.give_way if isinstance(model, NativeModel) and crowded else None
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
        memory = _plan_blocks(settings, opened.max_model_len, context.executor.num_blocks if held is None else held)
    return Running(
        executor=for_the_line(bound, offer, activity, opened.program.vocab_size),
        activity=activity,
        memory=memory,
        report=msgspec.structs.replace(opened, memory=memory).describe() + kernels,
    )


def _describe(model: ReferenceModel | NativeModel) -> str:
    """What runs the model, as a line of the plan; what torch does between compiled segments is named and counted."""
    if not isinstance(model, NativeModel):
        return f"{'kernels':<16}  reference: torch, one operation at a time"
    breaks = ", ".join(f"{count} {name}" for name, count in model.breaks.items())
    return f"{'kernels':<16}  {model.dialect}" + (f", with torch in between: {breaks}" if breaks else "")


def load_model(opened: Opened, settings: Settings, progress: Progress) -> ReferenceModel | NativeModel:
    """Headrace's own model, with its weights and an empty KV cache.

    Raises:
        ConfigError: the executor that was chosen does without it.
    """
    if opened.quantizer is None or opened.attention is None:
        raise ConfigError(
            f"line.executor: the {whose(opened.executor)} does not run Headrace's own model, which is needed here; "
            "choose thread"
        )
    return load(
        opened.checkpoint.artifact,
        opened.checkpoint,
        opened.architecture,
        opened.quantizer,
        opened.attention,
        num_blocks=opened.memory.num_blocks + 1,
        block_size=opened.memory.block_size,
        dialect=opened.context.kernels,
        num_threads=settings.model.threads or usable_cpus(),
        progress=progress,
    )


def open_model(settings: Settings, progress: Progress, where: WhereOf = no_origin) -> Opened:
    """Everything that can be known without reading weights."""
    registry = discover(settings, where)
    # First, for to bring the checkpoint here may take long.
    executor = registry.select("executor", settings.line.executor.use, where("line.executor") / "use")
    own = uses_model(executor)
    _refuse_idle(settings, executor, where)
    context = Context()
    sources = {component.name: component.build(context).component for component in registry.offered("model_source")}
    artifact = resolve(settings.model.uri, sources, progress)
    loader = registry.build("weight_loader", Use(use=artifact.kind), context).component
    checkpoint: Checkpoint = loader.open(artifact)
    context.checkpoint = checkpoint
    context.kernels = _kernels(settings, where) if own else None
    context.block_size = settings.line.block_size
    architecture = _architecture(registry, settings, checkpoint, where)
    program = context.program = architecture.program(checkpoint)
    max_model_len = _max_model_len(settings, program, where)
    quantizer: Quantizer | None = None
    attention: Attention | None = None
    memory: MemoryPlan | BlockPlan
    if own:
        quantizer = registry.build("quantizer", settings.model.quantizer, context, where("model.quantizer")).component
        found = registry.build("attention", settings.model.attention, context, where("model.attention"))
        attention = found.component
        weights = weight_bytes(program, checkpoint, quantizer)
        memory = _plan(settings, program, max_model_len, weights, found.component)
    else:
        memory = _plan_blocks(settings, max_model_len)
    return Opened(
        registry=registry,
        context=context,
        checkpoint=checkpoint,
        architecture=architecture,
        program=program,
        executor=executor,
        quantizer=quantizer,
        attention=attention,
        memory=memory,
        max_model_len=max_model_len,
    )


def plan_memory(settings: Settings, where: WhereOf = no_origin) -> str:
    """The memory plan, for people. Reads no weights and builds no executor, so some of it is an estimate."""
    opened = open_model(settings, lambda what, done, total: None, where)
    opened.checkpoint.close()
    return f"{opened.checkpoint.artifact.name} ({opened.checkpoint.architecture})\n{opened.describe()}"


def _refuse_idle(settings: Settings, executor: Component, where: WhereOf) -> None:
    """Raises:
    ConfigError: settings of Headrace's own model were set, and *executor* does without it; lists them.
    """
    values = msgspec.to_builtins(settings, enc_hook=int, str_keys=True)
    problems = list(idle(values, executor, where))
    if problems:
        raise ConfigError("\n".join(map(str, problems)))


def _plan_blocks(settings: Settings, max_model_len: int, held: int | None = None) -> BlockPlan:
    line = settings.line
    try:
        return plan_blocks(
            max_model_len=max_model_len,
            max_running=line.max_running,
            block_size=line.block_size,
            kv_blocks=line.kv_blocks,
            held=held,
        )
    except MemoryPlanError as error:
        raise MemoryPlanError(f"{settings.model.uri}: {error}") from error


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


def _kernels(settings: Settings, where: WhereOf) -> str | None:
    """The instruction set that will run the model; None: the reference."""
    asked = settings.model.kernels
    if asked == "reference":
        return None
    found = dialect("" if asked in ("auto", "native") else asked)
    if found is None and asked != "auto":
        best = dialect()
        there = "were not built" if best is None else f"speak {best} at best on this processor"
        raise ConfigError(
            f"{where('model.kernels')}: {asked} needs the compiled kernels, which {there}; "
            "take auto, or install with a C++ compiler (g++) at hand"
        )
    return found


def _plan(settings: Settings, program: Program, max_model_len: int, weights: int, attention: Attention) -> MemoryPlan:
    line = settings.line
    widest = max((program.weights[op.weight].shape[0] for op in program.ops if isinstance(op, Linear)), default=0)
    max_len = max_model_len
    try:
        return plan(
            available_bytes=available_memory(),
            weight_bytes=weights,
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
                dtype_bytes=KV_BYTES[getattr(attention, "kv_dtype", "float32")],
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
