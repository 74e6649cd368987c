"""What plugins offer, and what becomes of it once chosen."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

from .decode import Problem, decode
from .errors import ConfigError, PluginError, StartError
from .origins import Where
from .protocols import Context
from .slots import Slot

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REFERENCE: Final = re.compile(r"[\w.]+:[\w.]+")

State = Literal["loaded", "selected", "skipped", "failed"]


class PluginInfo(Struct, kw_only=True):
    """What is known of one installed plugin.

    Attributes:
        id: the name of its entry point.
        distribution, version: of the pip distribution that brought it; "" for code in this process.
        reason: why it was skipped or has failed.
        slots: slot → names of the components it offers. A failed plugin offers none that can be chosen.
        withheld: opt-in slots it would fill if `plugins.allow` had its distribution.
        import_ms: how long its import took; None where it was not imported.
    """

    id: str
    distribution: str = ""
    version: str = ""
    state: State = "loaded"
    reason: str = ""
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()
    import_ms: float | None = None

    @property
    def origin(self) -> str:
        """`name version` of the distribution."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.id} ({self.origin})" if self.origin else self.id


class Bound(Struct, frozen=True, kw_only=True):
    """A component that was chosen and built.

    Attributes:
        name: without the plugin.
        plugin: who to blame.
        component: what the factory returned; does what the slot's protocol asks for.
        params: what a request may set; None: nothing.
        distribution: `name version`; "" for code in this process.
        options: what it was built with; None where it takes none.
        revision: of the Stack it was built for.
    """

    name: str
    plugin: str
    component: Any
    params: type[Struct] | None = None
    distribution: str = ""
    options: Struct | None = None
    revision: int = 0


class Component(Struct, frozen=True, kw_only=True):
    """A factory that a plugin has registered. See `protocols.Register` for the attributes."""

    slot: Slot
    name: str
    plugin: PluginInfo
    factory: Callable[..., object] | str
    config: type[Struct] | None = None
    params: type[Struct] | None = None
    replaces: str | None = None
    doc: str = ""

    def build(self, context: Context, options: Mapping[str, Any] | None = None, where: Where | None = None) -> Bound:
        """Call the factory.

        Args:
            options: as the configuration has them.
            where: the key of *options* in the configuration.

        Raises:
            ConfigError: the options are wrong; lists every problem.
            PluginError: the factory failed, or what it built does not fit the slot.
            StartError: what the factory itself raised on purpose.
        """
        decoded = self._decode(options or {}, where or Where(("options",)))
        factory = self.resolve()
        try:
            built = factory(context, decoded)
        except StartError:
            raise
        except Exception as error:
            raise self._failed(f"could not be built: {type(error).__name__}: {error}") from error
        missing = [name for name in _members(self.slot.protocol) if not hasattr(built, name)]
        if missing:
            wanted = f"protocols.{self.slot.protocol.__name__}"
            raise self._failed(f"must do what {wanted} says, but {type(built).__name__} lacks {', '.join(missing)}")
        return Bound(
            name=self.name,
            plugin=self.plugin.id,
            component=built,
            params=self.params,
            distribution=self.plugin.origin,
            options=decoded,
        )

    def resolve(self) -> Callable[..., object]:
        """The factory itself; one that was registered as `module:attribute` is imported now.

        Raises:
            PluginError: it cannot be.
        """
        if not isinstance(self.factory, str):
            return self.factory
        try:
            found: Callable[..., object] = pkgutil.resolve_name(self.factory)
        except StartError:
            raise
        except Exception as error:
            raise self._failed(f"could not be built: {type(error).__name__}: {error}") from error
        return found

    def _decode(self, options: Mapping[str, Any], where: Where) -> Struct | None:
        if self.config is None:
            if options:
                raise ConfigError(f"{where}: {self.name} takes no options, got {', '.join(options)}")
            return None
        problems: list[Problem] = []
        decoded = decode(options, self.config, where, problems)
        if decoded is None:
            raise ConfigError("\n".join(map(str, problems)))
        return decoded

    def _failed(self, reason: str) -> PluginError:
        return PluginError(self.plugin.id, f"{self.slot.name} {self.name} {reason}", distribution=self.plugin.origin)


class Registrar:
    """The `register` that one plugin's hook for one slot is called with."""

    def __init__(self, slot: Slot, plugin: PluginInfo, components: list[Component]) -> None:
        self._slot = slot
        self._plugin = plugin
        self._components = components

    def __call__(
        self,
        name: str,
        factory: Callable[..., object] | str,
        *,
        config: type[Struct] | None = None,
        params: type[Struct] | None = None,
        replaces: str | None = None,
        doc: str = "",
    ) -> None:
        """See `protocols.Register`.

        Raises:
            ValueError, TypeError: the claim breaks a rule; the plugin fails with this reason.
        """
        _check_name(name)
        if any(known.slot is self._slot and known.name == name for known in self._components):
            raise ValueError(f"{self._slot.name} {name} is registered twice")
        _check_factory(name, factory)
        _check_struct(f"{name}: config", config, defaults=False)
        _check_struct(f"{name}: params", params, defaults=True)
        self._components.append(
            Component(
                slot=self._slot,
                name=name,
                plugin=self._plugin,
                factory=factory,
                config=config,
                params=params,
                replaces=replaces,
                doc=doc,
            )
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a name must be of letters, digits, '.', '_' and '-', got {name!r}")


def _check_factory(name: str, factory: object) -> None:
    if not callable(factory) and not (isinstance(factory, str) and _REFERENCE.fullmatch(factory)):
        raise TypeError(f"{name}: the factory must be callable or 'module:attribute', got {factory!r}")


def _check_struct(what: str, kind: object, *, defaults: bool) -> None:
    if kind is None:
        return
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        raise TypeError(f"{what} must be a msgspec.Struct, got {kind!r}")
    # Else a misspelt key would be ignored in silence.
    if not kind.__struct_config__.forbid_unknown_fields:
        raise TypeError(f"{what}={kind.__name__} must be declared with forbid_unknown_fields=True")
    required = [each.name for each in msgspec.structs.fields(kind) if each.required]
    if defaults and required:
        raise TypeError(f"{what}={kind.__name__} must have a default for every field, lacks {', '.join(required)}")


def _members(protocol: type) -> list[str]:
    names = {*vars(protocol), *vars(protocol).get("__annotations__", {})}
    return sorted(name for name in names if not name.startswith("_") or name == "__call__")
