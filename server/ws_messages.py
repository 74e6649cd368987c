"""The messages of `/v1/ws`, subprotocol `headrace.v1`: JSON objects told apart by `type`, one a text frame.

docs/websocket.md says when each is sent. Unknown fields are refused: the protocol is ours, and has a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ..hooks.errors import BadRequest, RequestError
from .errors import bad_body
from .limits import check_nesting

SUBPROTOCOL: Final = "headrace.v1"

RequestId = Annotated[str, Meta(min_length=1, max_length=64)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# ── from the client ───────────────────────────────────────────────────────────────────────────────────────────────


class Start(Struct, frozen=True, kw_only=True, tag="start", forbid_unknown_fields=True):
    """Answer *request*, the body of `/v1/chat/completions` or `/v1/completions`, under the client's own *id*."""

    id: RequestId
    request: msgspec.Raw
    kind: Literal["chat", "completion"] = "chat"


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel", forbid_unknown_fields=True):
    """Request *id* is no longer wanted. Means nothing when it has ended, or never was."""

    id: RequestId


class Ping(Struct, frozen=True, kw_only=True, tag="ping", forbid_unknown_fields=True):
    """Send *t* back."""

    t: Int64 | float


# ── from the server ───────────────────────────────────────────────────────────────────────────────────────────────


class Scored(Struct, frozen=True, kw_only=True):
    """A token's log-probability, and the likeliest ones in its place as (text, token id, log-probability)."""

    token: str
    logprob: float
    top: list[tuple[str, int, float]]


class Delta(Struct, frozen=True, kw_only=True, tag="delta", omit_defaults=True):
    """More of one choice.

    Attributes:
        seq: deltas of this request before this one.
        n: tokens behind it, those without text included: over an answer they sum to `usage.completion_tokens`.
        token_ids, logprobs: of these tokens, where the request asked for them.
    """

    id: str
    choice: int
    seq: int
    text: str
    n: int
    token_ids: tuple[int, ...] = ()
    logprobs: list[Scored] = []


class Done(Struct, frozen=True, kw_only=True, tag="done"):
    """The request has ended well. *reasons*: why each choice ended; the others as in the HTTP API."""

    id: str
    reasons: list[str]
    usage: dict[str, Any]
    timings: dict[str, Any]
    system_fingerprint: str


class Error(Struct, frozen=True, kw_only=True, tag="error"):
    """Request *id* has ended here; without an id, the message that caused it changed nothing."""

    id: str | None
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Pong(Struct, frozen=True, kw_only=True, tag="pong"):
    """The answer to `ping`."""

    t: int | float


_decode: Final[Callable[[str], Start | Cancel | Ping]] = msgspec.json.Decoder(Start | Cancel | Ping).decode
_encode: Final = msgspec.json.Encoder().encode


def decode(text: str) -> Start | Cancel | Ping:
    """Read a frame.

    Raises:
        BadRequest: it is none of the messages above.
    """
    try:
        check_nesting(text.encode("utf-8", "replace"))
    except BadRequest as error:
        raise BadRequest(str(error), code="bad_message") from None
    try:
        return _decode(text)
    except msgspec.MsgspecError as error:
        found = bad_body(error)
        reason = f"not a message of {SUBPROTOCOL}: {found}"
        raise BadRequest(reason, param=found.param, code="bad_message") from None


def encode(message: Delta | Done | Error | Pong) -> str:
    """The frame of a message."""
    return _encode(message).decode()


def error_message(id: str | None, error: RequestError) -> Error:
    """*error*, as the client is told of it."""
    code = error.code or error.kind
    return Error(id=id, code=code, message=str(error), param=error.param, retry_after_s=error.retry_after_s)
