"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` with the right status."""

from __future__ import annotations

import re
from math import ceil
from typing import Final

import msgspec
from starlette.responses import Response

from ..hooks.errors import BadRequest, RequestError

# msgspec gives no codes: the place of an error is the tail of its message.
_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")


def error_object(error: RequestError) -> dict[str, dict[str, str | None]]:
    """The body that tells a client of *error*."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> Response:
    """*error* as a whole HTTP answer."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, ceil(error.retry_after_s)))
    body = msgspec.json.encode(error_object(error))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def bad_body(error: msgspec.MsgspecError) -> BadRequest:
    """What msgspec found, in the user's words: the field in front, and as `param`."""
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return BadRequest(f"the body must be JSON: {message}")
    place = _PLACE.search(message)
    reason = message[: place.start()] if place else message
    path = place["path"] if place else ""
    missing = _MISSING.match(reason)
    if missing:
        field = f"{path}.{missing['name']}" if path else missing["name"]
        return BadRequest(f"{field}: required, and missing", param=field)
    if not path:
        return BadRequest(f"the body must be a JSON object: {reason}")
    return BadRequest(f"{path}: {reason[0].lower()}{reason[1:]}", param=path)
