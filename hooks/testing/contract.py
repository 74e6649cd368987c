"""What all contracts share: find the component as the engine does, build it, try it on many random cases.

A contract is a class whose methods `test_…` each check one promise. A plugin's author subclasses it and names the
component; pytest does the rest, and `run` does it without pytest. Nothing here is random from run to run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any, ClassVar, Final, NoReturn, TypeVar, cast
from unittest import SkipTest

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from msgspec import Struct
from msgspec import inspect as types

from ..components import Bound, Component
from ..decode import convert
from ..discovery import GROUP
from ..protocols import Context
from ..registry import Registry

T = TypeVar("T")

EXAMPLES: Final = 30
"""Random cases a promise is tried on, unless the contract or the command line says otherwise."""


class Broken(AssertionError):
    """A component does not keep a promise of its slot."""


def ensure(kept: object, message: str) -> None:
    """Raise `Broken` with *message* unless the promise was *kept*. Unlike `assert`, it also works under `python -O`."""
    if not kept:
        raise Broken(message)


def skip(reason: str) -> NoReturn:
    """Leave a promise untried, visibly."""
    raise SkipTest(reason)


class Contract:
    """Subclass the contract of a slot, and name the component.

    Attributes:
        plugin: the module with the marked hooks, or its name, or the name of its entry point.
        name: of the component; may stay empty where the plugin offers but one for the slot.
        options: the server's settings for it, as the configuration would have them.
        examples: random cases to try each promise on.
        shrinks: look for a small case when one fails.
    """

    slot: ClassVar[str] = ""
    plugin: ClassVar[object] = ""
    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    examples: ClassVar[int] = EXAMPLES
    shrinks: ClassVar[bool] = True
    _entry: ClassVar[Component]

    def context(self) -> Context:
        """What the factory is called with. Override it where the component needs more."""
        return Context()

    def build(self, context: Context | None = None) -> Any:
        """A fresh component, built as the engine builds it."""
        return self.bound(context).component

    def bound(self, context: Context | None = None) -> Bound:
        """The same, with its name and parameter struct."""
        return self.entry().build(context or self.context(), self.options)

    def entry(self) -> Component:
        """The registered factory.

        Raises:
            Broken: there is no plugin or component of the name.
            PluginError: the plugin cannot be used; says why.
        """
        cls = type(self)
        # Kept for the class and not for those that inherit from it: a look at what is installed takes long.
        if "_entry" not in cls.__dict__:
            cls._entry = self._find()
        return cls._entry

    def _find(self) -> Component:
        offered = _registry(self.plugin).offered(self.slot)
        found = [each for each in offered if self.name in ("", each.name)]
        names = ", ".join(each.name for each in offered) or "nothing"
        wanted = f"called {self.name!r}" if self.name else "(set name)"
        ensure(len(found) == 1, f"the plugin must offer one {self.slot} {wanted}, it offers {names}")
        return found[0]

    def for_all(self, *strategies: SearchStrategy[Any], check: Callable[..., None]) -> None:
        """Call *check* with values of the *strategies*, many times; the same ones in each run."""
        tried = settings(
            max_examples=self.examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if self.shrinks else [Phase.generate],
        )
        tried(given(*strategies)(check))()

    # ── what holds in every slot ──────────────────────────────────────────────────────────────────────────────────

    def test_it_is_registered_and_can_be_built(self) -> None:
        """The registry finds it, its options decode, and what the factory returns fits the slot."""
        self.bound()

    def test_its_structs_refuse_unknown_fields(self) -> None:
        """Also those inside others: a misspelt key must be an error wherever it stands."""
        entry = self.entry()
        for what, kind in (("config", entry.config), ("params", entry.params)):
            loose = sorted(_loose(kind)) if kind else []
            ensure(not loose, f"{what}: {', '.join(loose)} must be declared with forbid_unknown_fields=True")

    def test_its_parameters_have_defaults_within_their_limits(self) -> None:
        """A request that says nothing must be possible."""
        kind = self.entry().params
        if kind is None:
            return
        defaults = msgspec.to_builtins(kind())
        try:
            convert(defaults, kind)
        except msgspec.ValidationError as error:
            raise Broken(f"the defaults of {kind.__name__} must pass its own limits: {error}") from None


class Parametrized(Contract):
    """A contract of a slot whose components take parameters from requests.

    Attributes:
        params: parameters to try, each as a request would have it.
    """

    params: ClassVar[Sequence[Mapping[str, Any]]] = ({},)

    def decoded(self) -> list[Struct]:
        """`params`, decoded as a request's are."""
        kind = self.entry().params or NoParams
        try:
            return [cast("Struct", convert(dict(each), kind)) for each in self.params]
        except msgspec.ValidationError as error:
            raise Broken(f"each of params must pass the limits of {kind.__name__}: {error}") from None

    def test_its_parameters_are_as_a_request_has_them(self) -> None:
        """Those that the contract tries, and none at all."""
        ensure(self.decoded(), "params must hold at least one set of parameters to try")


class NoParams(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a component that takes none."""


def promises_of(contract: type[Any]) -> Iterator[str]:
    """The names of its tests, in the order in which they are written; those of the base first."""
    seen: dict[str, None] = {}
    for each in reversed(contract.__mro__):
        seen.update(dict.fromkeys(name for name, member in vars(each).items() if _is_test(name, member)))
    yield from seen


def run(contract: type[Any], tests: Sequence[str] | None = None) -> dict[str, Exception | None]:
    """Try every promise of *contract*, without pytest.

    Args:
        tests: names of those to try; None: all.

    Returns:
        Test → what it failed with, a `unittest.SkipTest` where it was not tried, or None where the promise is kept.
    """
    results: dict[str, Exception | None] = {}
    for name in promises_of(contract) if tests is None else tests:
        try:
            getattr(contract(), name)()
        except Exception as error:
            results[name] = error
        else:
            results[name] = None
    return results


def _is_test(name: str, member: object) -> bool:
    return name.startswith("test_") and inspect.isfunction(member)


def _registry(plugin: object) -> Registry:
    if isinstance(plugin, str):
        entries = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == plugin]
        if entries:
            # The contract's author trusts it: it may fill opt-in slots.
            allow = [entry.dist.name for entry in entries if entry.dist is not None]
            registry = Registry.discover(entry_points=entries, allow=allow, environ={})
            for info in registry.report():
                ensure(info.state != "failed", f"plugin {info}: {info.reason}")
            return registry
        plugin = _module(plugin)
    registry = Registry()
    registry.add(plugin, getattr(plugin, "__name__", "plugin"))
    return registry


def _module(name: str) -> object:
    reason = f"plugin must be a module, or the name of one or of an entry point in {GROUP}, got {name!r}"
    ensure(name, f"{reason}; set it in the class")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise Broken(f"{reason}; `pip install -e .` the plugin, or put its folder on the path") from None


def _loose(kind: type[Struct]) -> set[str]:
    """The structs in *kind*, itself included, that would ignore a field they do not know."""
    found: set[str] = set()
    todo: list[object] = [types.type_info(kind)]
    seen: list[object] = []
    while todo:
        info = todo.pop()
        if isinstance(info, list | tuple):
            todo += info
        elif isinstance(info, types.Field):
            todo.append(info.type)
        elif isinstance(info, types.Type) and not any(info is known for known in seen):
            seen.append(info)
            if isinstance(info, types.StructType) and not info.forbid_unknown_fields:
                found.add(info.cls.__name__)
            todo += [getattr(info, name) for name in info.__struct_fields__]
    return found
