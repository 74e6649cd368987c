"""Builds the Stack: when the engine starts, and again while it serves, beside the model that stays.

Runs in a worker thread and changes nothing but what is imported: whoever asked installs what comes of it. Everything is
chosen through the registry, the built-ins too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import structlog

from ..hooks.chain import build_sampling
from ..hooks.components import Bound
from ..hooks.decode import Use
from ..hooks.errors import ConfigError, RequestError, StartError
from ..hooks.origins import Where
from ..hooks.protocols import Context
from ..hooks.registry import Registry
from ..hooks.reimport import Code
from ..hooks.settings import SECTIONS, Settings
from ..hooks.stack import Stack, freeze
from .asked import settle
from .parts import Restacked

T = TypeVar("T")
WhereOf = Callable[[str], Where]

SWAPPED: Final = frozenset(
    (
        "profile",
        "observers",
        "model.chat_template",
        "model.use_generation_config",
        "line.policy",
        "line.admission",
        "sampling.phases",
        "sampling.extra_processors",
        "sampling.sampler",
        "sampling.stop_watchers",
        "sampling.defaults",
        "sampling.locked",
        "plugins.allow",
        "plugins.disable",
        "plugins.strict",
    )
)
"""Settings that can change while the engine serves. All others need a restart."""
GENERATION: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What is taken from a checkpoint's `generation_config`."""

log = structlog.get_logger()


class Restack:
    """What stays when the Stack is built anew: the model's own side.

    Args:
        context: what factories are called with.
        tokenizer: the model's.
        generation: the checkpoint's `generation_config`.
        code: what is imported of strangers' code.
    """

    def __init__(self, context: Context, tokenizer: Bound, generation: Mapping[str, Any], code: Code) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self._generation = generation
        self._code = code

    def __call__(self, settings: Settings, before: Settings, where: WhereOf, old: Stack) -> Restacked:
        """A Stack for *settings*.

        Args:
            before: the settings that hold now.
            where: says where those of *settings* come from.
            old: the Stack that serves now. Its admission components and observers of which nothing has changed are
                taken over, with what they remember.

        Raises:
            StartError: lists all that is in the way. Nothing has changed.
        """
        changed = tuple(changes(before, settings))
        with self._code.renewed() as renewed:
            problems = Problems()
            for key in changed:
                if key not in SWAPPED:
                    problems.note(ConfigError(f"{where(key)}: cannot be changed while it serves; it needs a restart"))
            registry = discover(settings, where)
            defaults = default_params(settings, self._generation)
            context = msgspec.structs.replace(self._context)
            args = (registry, context, settings, where, self._tokenizer, self._code)
            stack = problems.run(partial(build_stack, *args, defaults=defaults, revision=old.revision + 1))
            if stack is not None:
                problems.run(partial(try_out, stack, defaults))
            problems.end()
        assert stack is not None
        stack, spare = _taken_over(stack, old, {each.partition(" ")[0] for each in renewed})
        close(spare)
        return Restacked(stack=stack, defaults=defaults, changed=changed, plugins=renewed)


class Problems:
    """Keeps what is wrong until all has been looked at."""

    def __init__(self) -> None:
        self._errors: list[StartError] = []

    def note(self, error: StartError) -> None:
        self._errors.append(error)

    def run(self, work: Callable[[], T]) -> T | None:
        """What *work* gives; None where it fails, which is noted."""
        try:
            return work()
        except StartError as error:
            self.note(error)
            return None

    def end(self) -> None:
        """Raises:
        StartError: what was noted: the one error, or a `ConfigError` with all of them.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError("\n".join(dict.fromkeys(map(str, self._errors))))


def discover(settings: Settings, where: WhereOf) -> Registry:
    """The plugins that are installed. Says which of them have failed.

    Raises:
        ConfigError: see `Registry.discover`.
    """
    plugins = settings.plugins
    registry = Registry.discover(
        disable=plugins.disable, allow=plugins.allow, strict=plugins.strict, where=where("plugins")
    )
    for info in registry.report():
        if info.state == "failed":
            log.warning("plugin failed to load", plugin=str(info), reason=info.reason)
    return registry


def build_stack(
    registry: Registry,
    context: Context,
    settings: Settings,
    where: WhereOf,
    tokenizer: Bound,
    code: Code,
    *,
    defaults: Mapping[str, object],
    revision: int = 0,
) -> Stack:
    """What stands between a request and its tokens.

    Args:
        context: with the model's tokenizer and the sizes for sampling.
        tokenizer: the model's, built.
        code: told of what is imported in the end.
        defaults: the sampling parameters of requests that do not set them; part of the fingerprint.

    Raises:
        StartError: one cannot be used, or several.
    """
    problems = Problems()

    def one(slot: str, use: Use, key: str) -> Bound | None:
        return problems.run(partial(registry.build, slot, use, context, where(key)))

    def several(slot: str, uses: Sequence[Use], key: str) -> list[Bound]:
        places = [where(key) / index for index in range(len(uses))]
        built = [
            problems.run(partial(registry.build, slot, use, context, place))
            for use, place in zip(uses, places, strict=True)
        ]
        return [bound for bound in built if bound is not None]

    template = one("chat_template", settings.model.chat_template, "model.chat_template")
    sampling = problems.run(lambda: build_sampling(registry, settings.sampling, context, where("sampling")))
    policy = one("scheduler_policy", settings.line.policy, "line.policy")
    observers = several("observer", settings.observers, "observers")
    stops = several("stop", settings.sampling.stop_watchers, "sampling.stop_watchers")
    admission = several("admission", settings.line.admission, "line.admission")
    problems.end()
    assert template is not None and sampling is not None and policy is not None  # noqa: PT018
    code.note()
    chain, sampler = sampling

    def mark(bounds: Sequence[Bound]) -> tuple[Bound, ...]:
        return tuple(msgspec.structs.replace(bound, revision=revision) for bound in bounds)

    template, policy, sampler = mark([template, policy, sampler])
    processors = [bound for _, bounds in chain for bound in bounds]
    chosen = [template, policy, sampler, *processors, *observers, *stops, *admission]
    beside = {"defaults": defaults, "code": code.digests([bound.distribution for bound in chosen])}
    return freeze(
        tokenizer=tokenizer,
        chat_template=template,
        policy=policy,
        chain=tuple((phase, mark(bounds)) for phase, bounds in chain),
        sampler=sampler,
        observers=mark(observers),
        stops=mark(stops),
        admission=mark(admission),
        revision=revision,
        beside={name: value for name, value in beside.items() if value},
    )


def default_params(settings: Settings, generation: Mapping[str, Any]) -> Mapping[str, object]:
    """Sampling parameters of requests that do not set them: the checkpoint's under the operator's."""
    generation = generation if settings.model.use_generation_config else {}
    defaults = {name: generation[name] for name in GENERATION if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    return {**defaults, **settings.sampling.defaults}


def try_out(stack: Stack, defaults: Mapping[str, object]) -> None:
    """Raises:
    ConfigError: a request that sets nothing would be refused.
    """
    try:
        stack.resolve(settle(defaults, {}))
        stack.resolve_sampler()
        stack.resolve_stops()
    except RequestError as error:
        raise ConfigError(f"sampling: a request that sets nothing would be refused: {error}") from error


def changes(before: Settings, after: Settings) -> Iterator[str]:
    """The keys of settings that are not what they were."""
    for name in Settings.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if name in SECTIONS:
            keys = type(old).__struct_fields__
            yield from (f"{name}.{key}" for key in keys if getattr(old, key) != getattr(new, key))
        elif old != new:
            yield name


def close(bounds: Sequence[Bound]) -> None:
    """Let go of components that will not be called again. Not on the loop: it may wait for a disk."""
    for bound in bounds:
        try:
            getattr(bound.component, "close", lambda: None)()
        except Exception:
            log.exception("a component that was replaced failed to close", plugin=bound.plugin, component=bound.name)


def _taken_over(stack: Stack, old: Stack, renewed: set[str]) -> tuple[Stack, list[Bound]]:
    """*stack* with the components of *old* that remember something and of which nothing has changed; and the spare."""
    spare: list[Bound] = []

    def take(new: Bound, olds: list[Bound]) -> Bound:
        for each in olds:
            same = (each.name, each.plugin, each.distribution, each.options)
            if same == (new.name, new.plugin, new.distribution, new.options) and not _of(each, renewed):
                olds.remove(each)
                spare.append(new)
                return each
        return new

    admission, observers = list(old.admission), list(old.observers)

    return msgspec.structs.replace(
        stack,
        admission=tuple(take(each, admission) for each in stack.admission),
        observers=tuple(take(each, observers) for each in stack.observers),
    ), spare


def _of(bound: Bound, distributions: set[str]) -> bool:
    return bound.distribution.partition(" ")[0] in distributions
