"""An ASGI application called by hand, as a server would: one scope, what it hears, and what it says in which order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from msgspec import Struct

from .contract import ensure
from .loop import on_loop

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Answer(Struct, frozen=True, kw_only=True):
    """What came back over HTTP."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


def http_scope(path: str = "/", method: str = "GET", headers: Mapping[bytes, bytes] | None = None) -> Scope:
    """As Hypercorn makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), *(headers or {}).items()],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }


def called(app: App, scope: Scope, heard: Sequence[Message] = ()) -> list[Message]:
    """What *app* says when it hears the messages *heard*, and after them that the client has gone."""
    said: list[Message] = []

    async def call() -> None:
        await app(scope, hears(heard), says(said))

    on_loop(call, patience_s=60)
    return said


def hears(messages: Sequence[Message]) -> Receive:
    """A `receive` of these *messages*, then of a disconnect."""
    left = list(messages)

    async def receive() -> Message:
        return left.pop(0) if left else {"type": "http.disconnect"}

    return receive


def says(said: list[Message]) -> Send:
    """A `send` that notes what it is given."""

    async def send(message: Message) -> None:
        said.append(message)

    return send


def answer(said: Sequence[Message]) -> Answer:
    """The messages of one HTTP answer, which must be well formed.

    Raises:
        Broken: they are not.
    """
    kinds = [message.get("type") for message in said]
    body = ["http.response.body"] * (len(said) - 1)
    ensure(
        len(said) >= 2 and kinds == ["http.response.start", *body], f"an answer is a start and its body, found {kinds}"
    )
    more = [message.get("more_body", False) for message in said[1:]]
    ensure(
        more == [True] * (len(more) - 1) + [False], f"the last part of the body alone must be the last, found {more}"
    )
    headers = {bytes(name).lower(): bytes(value) for name, value in said[0].get("headers", ())}
    return Answer(
        status=said[0]["status"],
        headers=headers,
        body=b"".join(bytes(message.get("body", b"")) for message in said[1:]),
    )


def request(app: App, path: str, method: str = "GET", body: bytes = b"") -> Answer:
    """One request over HTTP."""
    heard = [{"type": "http.request", "body": body, "more_body": False}]
    headers = {b"content-length": str(len(body)).encode()} if body else {}
    return answer(called(app, http_scope(path, method, headers), heard))
