"""The contract of the slot `routes`: Starlette routes that answer, also what nobody should have sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route

from .asgi import Answer, request
from .contract import Contract, ensure

PREFIX = "/plugins/it"
HOSTILE = (b"", b"{", b"[" * 2000, b"\xff\xfe", b'{"a": NaN}', b"null", b"{}", b"a" * 100_000)


class RoutesContract(Contract):
    """Mounts the routes as the server does, and asks them.

    Attributes:
        asks: of requests that must work: (method, path below the mount, body, status, what the answer contains).
    """

    slot = "routes"
    asks: ClassVar[Sequence[tuple[str, str, bytes, int, bytes]]] = ()

    def asked(self, method: str, path: str, body: bytes = b"") -> Answer:
        """One request to freshly mounted routes; an error of theirs is raised."""
        app = Starlette(routes=[Mount(PREFIX, routes=self.build().routes())])
        try:
            return request(app, PREFIX + path, method, body)
        except Exception as error:
            name = f"{method} {path} with {body[:20]!r}"
            ensure(False, f"a route must answer whatever it is sent, {name} raised {type(error).__name__}: {error}")
            raise

    def test_they_are_routes(self) -> None:
        routes = self.build().routes()
        ensure(isinstance(routes, Sequence) and routes, f"routes must return a sequence of routes, found {routes!r}")
        for route in routes:
            ensure(isinstance(route, BaseRoute), f"each must be a route of Starlette, found {route!r}")

    def test_no_two_are_the_same(self) -> None:
        """The second would never be reached."""
        seen: set[tuple[str, str]] = set()
        for route in self._routes():
            for method in sorted(route.methods or ()):
                ensure((method, route.path) not in seen, f"{method} {route.path} must be there once, found it twice")
                seen.add((method, route.path))

    def test_they_answer_as_they_should(self) -> None:
        """Each that is listed in `asks`; and each plain GET answers with something that is no error of the server."""
        for method, path, body, status, content in self.asks:
            found = self.asked(method, path, body)
            ensure(found.status == status, f"{method} {path} must be answered with {status}, found {found.status}")
            ensure(content in found.body, f"{method} {path} must answer with {content!r}, found {found.body[:80]!r}")
        for route in self._routes():
            if "GET" in (route.methods or ()) and "{" not in route.path:
                found = self.asked("GET", route.path)
                ensure(found.status < 500, f"GET {route.path} must be answered, found the status {found.status}")

    def test_bodies_of_any_kind_are_answered(self) -> None:
        """With a status under 500, and in bounded time."""
        for route in self._routes():
            path = _filled(route.path)
            for method in sorted((route.methods or set()) & {"POST", "PUT", "PATCH", "DELETE"}):
                for body in HOSTILE:
                    found = self.asked(method, path, body)
                    name = f"{method} {path} with {body[:20]!r}"
                    ensure(found.status < 500, f"{name} must be answered, found the status {found.status}")

    def test_parameters_of_any_kind_are_answered(self) -> None:
        for route in self._routes():
            if "{" not in route.path:
                continue
            for value in ("0", "-1", "a" * 5000, "é", "..", "%00", "' OR 1"):
                for method in sorted((route.methods or set()) - {"HEAD"}):
                    found = self.asked(method, _filled(route.path, value))
                    name = f"{method} {route.path} with {value[:20]!r}"
                    ensure(found.status < 500, f"{name} must be answered, found the status {found.status}")

    def _routes(self) -> list[Route]:
        found: list[Route] = []
        todo: list[Any] = list(self.build().routes())
        while todo:
            route = todo.pop(0)
            if isinstance(route, Route):
                found.append(route)
            elif isinstance(route, Mount):
                todo += [_below(route.path, each) for each in route.routes]
        return found


def _below(prefix: str, route: Any) -> Any:
    if isinstance(route, Route):
        return Route(prefix + route.path, route.endpoint, methods=list(route.methods or ()))
    return route


def _filled(path: str, value: str = "1") -> str:
    """*path* with each parameter given as *value*."""
    parts: Mapping[str, str] = {part: value for part in path.split("/") if part.startswith("{")}
    return "/".join(parts.get(part, part) for part in path.split("/"))
