"""Builds the chain of logits processors and the sampler, in the order of the configuration."""

from __future__ import annotations

from .components import Bound
from .decode import Use
from .errors import ConfigError, PluginError
from .locks import unknown_fields
from .origins import Where
from .params import ALIASES
from .protocols import PHASES, Context, Phase
from .registry import Registry
from .settings import Sampling
from .stack import Chain


def build_sampling(
    registry: Registry, config: Sampling, context: Context, where: Where | None = None
) -> tuple[Chain, Bound]:
    """Build the logits processors in the order of the configuration, and the sampler.

    Args:
        context: with `sampling` filled in.
        where: the key of *config*.

    Raises:
        ConfigError: lists every wrong choice.
        PluginError: a chosen plugin has failed, or offers something that cannot stand here.
    """
    where = where or Where(("sampling",))
    builder = _Builder(registry, context)
    chain = [
        (
            group.phase,
            [
                builder.processor(use, where / "phases" / index / "processors" / position, (group.phase,))
                for position, use in enumerate(group.processors)
            ],
        )
        for index, group in enumerate(config.phases)
    ]
    listed = tuple(phase for phase, _ in chain)
    for index, use in enumerate(config.extra_processors):
        bound = builder.processor(use, where / "extra_processors" / index, listed)
        if bound is not None:
            [bounds for phase, bounds in chain if phase == bound.component.phase][-1].append(bound)
    sampler = builder.build("sampler", config.sampler, where / "sampler")
    if not builder.problems and sampler is not None:
        params = {bound.name: bound.params for _, bounds in chain for bound in bounds if bound is not None}
        problems = unknown_fields(config.locked, {"logits": params}, sampler.params, where / "locked")
        builder.problems += map(str, problems)
    if builder.problems or sampler is None:
        raise ConfigError("\n".join(builder.problems))
    return tuple((phase, tuple(filter(None, bounds))) for phase, bounds in chain), sampler


class _Builder:
    """Builds one component after another, and keeps what is wrong for the end."""

    def __init__(self, registry: Registry, context: Context) -> None:
        self.problems: list[str] = []
        self._registry = registry
        self._context = context
        self._owners: dict[str, str] = {}
        """Name of each processor in the chain → its plugin."""

    def build(self, slot: str, use: Use, where: Where) -> Bound | None:
        try:
            return self._registry.build(slot, use, self._context, where)
        except ConfigError as error:
            self.problems.append(str(error))
            return None

    def processor(self, use: Use, where: Where, phases: tuple[Phase, ...]) -> Bound | None:
        bound = self.build("logits_processor", use, where)
        if bound is None:
            return None
        owner = self._owners.setdefault(bound.name, bound.plugin)
        if owner != bound.plugin:
            # Requests know processors by their bare name.
            reason = f"{bound.name} of plugin {owner} is in the chain already, so {use.use} cannot be told from it"
            self.problems.append(f"{where / 'use'}: {reason}; choose one of them")
            return None
        if _phase(bound) in phases:
            return bound
        reason = f"{bound.name} belongs to the phase {_phase(bound)}, which must be {' or '.join(phases)} here"
        self.problems.append(f"{where / 'use'}: {reason}")
        return None


def _phase(bound: Bound) -> Phase:
    """The phase a processor declares, after a look at whether it can stand in a chain at all."""
    phase: Phase = bound.component.phase
    if phase not in PHASES:
        raise _unfit(bound, f"its phase must be one of {', '.join(PHASES)}, got {phase!r}")
    fields = () if bound.params is None else bound.params.__struct_fields__
    for alias, (name, field) in ALIASES.items():
        if name == bound.name and field not in fields:
            raise _unfit(bound, f"{alias} of a request fills the field {field} of its params, which is not there")
    return phase


def _unfit(bound: Bound, reason: str) -> PluginError:
    return PluginError(bound.plugin, f"logits processor {bound.name}: {reason}", distribution=bound.distribution)
