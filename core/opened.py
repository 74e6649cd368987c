"""A model that is known but not loaded: find plugins, open the checkpoint, choose the parts, plan memory.

Start-up only. Everything it chooses goes through the registry, the built-ins too. Reads no weights but in `load_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import msgspec
from msgspec import Struct

from ..hooks.choices import idle, uses_model
from ..hooks.components import Component
from ..hooks.decode import Use
from ..hooks.discovery import builtin
from ..hooks.errors import ConfigError, MemoryPlanError, ModelError
from ..hooks.origins import Where, no_origin
from ..hooks.program import Checkpoint, Linear, Program
from ..hooks.protocols import Architecture, Attention, Context, Quantizer
from ..hooks.registry import Registry
from ..hooks.settings import Settings
from .cpus import usable_cpus
from .executor import whose
from .kernels.native import dialect
from .kernels.native.model import NativeModel
from .kernels.reference import ReferenceModel
from .kv.memory import available_memory
from .kv.plan import BlockPlan, MemoryPlan, estimate_step_bytes, kv_bytes_per_token, plan, plan_blocks
from .model.load import load, resolve, weight_bytes
from .parts import Progress
from .restack import discover

KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1}

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
        weights = weight_bytes(program, checkpoint, quantizer)
        context.weight_bits = 8 * weights / sum(prod(weight.shape) for weight in program.weights.values())
        found = registry.build("attention", settings.model.attention, context, where("model.attention"))
        attention = found.component
        memory = _plan(settings, program, max_model_len, weights, found.component)
    else:
        memory = block_plan(settings, max_model_len)
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


def block_plan(settings: Settings, max_model_len: int, held: int | None = None) -> BlockPlan:
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
                head_dim=program.head_dim + getattr(attention, "kv_extra", 0),
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
