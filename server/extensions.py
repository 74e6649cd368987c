"""What plugins add to the HTTP side: middleware, and routes under `/plugins/<plugin>/`.

Both widen whom we trust, so each distribution must stand in `plugins.allow`. Knows nothing of what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount

from ..hooks.errors import PluginError
from ..hooks.protocols import Context
from ..hooks.registry import Bound, Registry

if TYPE_CHECKING:
    from ..hooks.config import Loaded


class Extensions(Struct, frozen=True, kw_only=True):
    """What was chosen for the HTTP side, in the order of the configuration."""

    middleware: tuple[Bound, ...] = ()
    routes: tuple[Bound, ...] = ()

    def around(self) -> list[Middleware]:
        """For Starlette, the outermost first."""
        return [Middleware(bound.component) for bound in self.middleware]

    def mounts(self) -> list[Mount]:
        """One mount a plugin, with the routes of all its components.

        Raises:
            PluginError: something else than routes came of one.
        """
        found: dict[str, list[BaseRoute]] = {}
        for bound in self.routes:
            found.setdefault(bound.plugin, []).extend(_routes(bound))
        return [Mount(f"/plugins/{plugin}", routes=routes) for plugin, routes in found.items()]


NOTHING: Final = Extensions()


def build_extensions(loaded: Loaded) -> Extensions:
    """What the configuration chose.

    Raises:
        StartError: one cannot be used.
    """
    server = loaded.settings.server
    if not server.middleware and not server.routes:
        return NOTHING
    plugins = loaded.settings.plugins
    registry = Registry.discover(
        disable=plugins.disable, allow=plugins.allow, strict=plugins.strict, where=loaded.where("plugins")
    )
    context = Context()
    return Extensions(
        middleware=tuple(
            registry.build("middleware", use, context, loaded.where("server.middleware") / index)
            for index, use in enumerate(server.middleware)
        ),
        routes=tuple(
            registry.build("routes", use, context, loaded.where("server.routes") / index)
            for index, use in enumerate(server.routes)
        ),
    )


def _routes(bound: Bound) -> list[BaseRoute]:
    routes = list(bound.component.routes())
    for route in routes:
        if not isinstance(route, BaseRoute):
            reason = f"routes {bound.name} must give Starlette routes, got {type(route).__name__}"
            raise PluginError(bound.plugin, reason, distribution=bound.distribution)
    return routes
