"""The contract of the slot `middleware`: a pure ASGI wrapper, through which everything still passes, at once."""

from __future__ import annotations

from typing import Any, ClassVar

from .asgi import App, Message, Receive, Scope, Send, answer, called, hears, http_scope, says
from .contract import Contract, ensure
from .loop import on_loop

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class MiddlewareContract(Contract):
    """Wraps small applications, and looks at what goes in and comes out.

    Attributes:
        path: of the requests; one that the middleware lets pass.
        headers: of the requests, where it wants to see some.
        rewrites: it changes the bodies of answers, so that only their form is compared.
    """

    slot = "middleware"
    path: ClassVar[str] = "/v1/models"
    headers: ClassVar[dict[bytes, bytes]] = {}
    rewrites: ClassVar[bool] = False

    def wrapped(self, app: App) -> App:
        """*app* inside a fresh middleware."""
        found: App = self.build()(app)
        return found

    def scope(self) -> Scope:
        """Of a request that passes."""
        return http_scope(self.path, "POST", self.headers)

    def test_an_answer_passes(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for message in (START, _part(b"Hello"), _part(b".", False)):
                await send(dict(message))

        found = answer(called(self.wrapped(app), self.scope()))
        ensure(found.status == 200, f"the application's 200 must pass, found {found.status}")
        ensure(self.rewrites or found.body == b"Hello.", f"the body must pass (or set rewrites), found {found.body!r}")

    def test_the_body_of_a_request_passes(self) -> None:
        heard: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (message := await receive())["type"] == "http.request":
                heard.append(message)
            heard.append(message)
            await send(dict(START))
            await send(_part(b"", False))

        asked = [
            {"type": "http.request", "body": b"One", "more_body": True},
            {"type": "http.request", "body": b"Two", "more_body": False},
        ]
        called(self.wrapped(app), self.scope(), asked)
        body = b"".join(message.get("body", b"") for message in heard)
        ensure(body == b"OneTwo", f"the application must hear the whole body, found {body!r}")
        ensure(heard[-1]["type"] == "http.disconnect", f"it must hear that the client has gone, found {heard[-1]}")

    def test_a_stream_is_not_held_back(self) -> None:
        """Each part is out before the application makes the next."""
        said: list[Message] = []
        out: list[int] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({**START, "headers": [(b"content-type", b"text/event-stream")]})
            for number in range(4):
                await send(_part(b"data: %d\n\n" % number))
                out.append(sum(message.get("body", b"") != b"" for message in said))
            await send(_part(b"", False))

        async def call() -> None:
            await self.wrapped(app)(self.scope(), hears(()), says(said))

        on_loop(call, patience_s=60)
        ensure(out == [1, 2, 3, 4], f"each part must go out as it comes, found {out} parts out after each of four")

    def test_an_error_of_the_application_passes(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raise LookupError("of the application")

        said: list[Message] = []
        try:
            said = called(self.wrapped(app), self.scope())
        except LookupError:
            return
        ensure(said and answer(said).status >= 500, f"an error must pass, or become a status of 500, found {said}")

    def test_a_websocket_passes(self) -> None:
        scope = {**http_scope(self.path, headers=self.headers), "type": "websocket", "scheme": "ws", "subprotocols": []}
        del scope["method"]
        self._passes(
            scope,
            [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hi"}],
            [{"type": "websocket.accept"}, {"type": "websocket.send", "text": "hi"}],
        )

    def test_the_lifespan_passes(self) -> None:
        self._passes(
            {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}},
            [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}],
            [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}],
        )

    def test_two_requests_at_once_do_not_mix(self) -> None:
        """The second is answered while the first is under way."""
        inner: list[Message] = []
        outer: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            name = scope["path"].encode()
            await send(dict(START))
            if not inner and not scope["path"].endswith("/second"):
                second = {**self.scope(), "path": f"{self.path}/second", "raw_path": f"{self.path}/second".encode()}
                await wrapped(second, hears(()), says(inner))
            await send(_part(name, False))

        wrapped = self.wrapped(app)

        async def call() -> None:
            await wrapped(self.scope(), hears(()), says(outer))

        on_loop(call, patience_s=60)
        bodies = (answer(outer).body, answer(inner).body)
        wanted = (self.path.encode(), f"{self.path}/second".encode())
        ensure(self.rewrites or bodies == wanted, f"each request must have its own answer {wanted}, found {bodies}")

    def _passes(self, scope: Scope, heard: list[Message], said: list[Message]) -> None:
        reached: list[Any] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for message in said:
                reached.append((await receive())["type"])
                await send(dict(message))

        found = called(self.wrapped(app), scope, heard)
        kinds = [message["type"] for message in heard]
        ensure(reached == kinds, f"a scope of type {scope['type']} must reach the application, which heard {reached}")
        found_kinds, wanted = [m["type"] for m in found], [m["type"] for m in said]
        ensure(found_kinds == wanted, f"what it says must pass, {wanted}, found {found_kinds}")
