"""Admission `token-bucket`: so many requests and tokens a minute for each tenant. What is above is refused with 429.

    [line]
    admission = [{ use = "token-bucket", options = { requests_per_minute = 60, tokens_per_minute = 100_000 } }]

A bucket holds *burst_s* seconds' worth and is full at first. A request takes one from the bucket of requests when it
enters, and from the bucket of tokens what prompt and answer came to when it ends: then the bucket may be in debt, and
the next request waits until it is paid. `Retry-After` says when. A tenant is the name of a key (slot `auth`).

Source: Turner 1986, New Directions in Communications, IEEE Communications Magazine 24(10).
"""

from __future__ import annotations

import math
from typing import Annotated

import trio
from msgspec import Meta, Struct

from ..hooks.errors import Overloaded, StartError
from ..hooks.messages import Request
from ..hooks.protocols import Context, Load, Register
from ..hooks.registry import plugin

headrace_api = 1

MAX_TENANTS = 10_000
"""Buckets kept; full ones are dropped then, for a new one is full too."""

Rate = Annotated[float, Meta(gt=0, le=1e12)]


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    requests_per_minute: Rate | None = None
    """Requests that a tenant may start. Unset: any number."""
    tokens_per_minute: Rate | None = None
    """Tokens of prompts and answers that a tenant may use. Unset: any number."""
    burst_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Seconds for which the whole rate can be saved up."""


class Bucket:
    """What there is, and when that was."""

    __slots__ = ("at", "level")

    def __init__(self, level: float, at: float) -> None:
        self.level = level
        self.at = at


class Buckets:
    """One bucket a tenant.

    Args:
        rate: what flows in, a second.
        size: what a bucket holds; at least 1, else nothing could ever be taken.
    """

    def __init__(self, rate: float, size: float) -> None:
        self._rate = rate
        self._size = max(size, 1.0)
        self._buckets: dict[str, Bucket] = {}

    def wait_s(self, tenant: str) -> float:
        """Seconds until there is 1 in the bucket; 0: now."""
        return max(0.0, (1 - self._filled(tenant).level) / self._rate)

    def take(self, tenant: str, amount: float) -> None:
        """Take *amount*, and go into debt where there is less."""
        self._filled(tenant).level -= amount

    def _filled(self, tenant: str) -> Bucket:
        now = trio.current_time()
        if tenant not in self._buckets and len(self._buckets) >= MAX_TENANTS:
            self._buckets = {key: each for key, each in self._buckets.items() if self._level(each, now) < self._size}
        bucket = self._buckets.setdefault(tenant, Bucket(self._size, now))
        bucket.level, bucket.at = self._level(bucket, now), now
        return bucket

    def _level(self, bucket: Bucket, now: float) -> float:
        return min(self._size, bucket.level + (now - bucket.at) * self._rate)


class TokenBucket:
    """A bucket of requests and one of tokens, as configured."""

    def __init__(self, context: Context, options: Options) -> None:
        if options.requests_per_minute is None and options.tokens_per_minute is None:
            raise StartError("token-bucket: requests_per_minute or tokens_per_minute must be set, found neither")
        self._requests = _buckets(options.requests_per_minute, options.burst_s)
        self._tokens = _buckets(options.tokens_per_minute, options.burst_s)

    async def admit(self, request: Request, load: Load) -> None:
        """See `protocols.Admission`."""
        tenant = request.tenant
        for what, buckets in (("requests", self._requests), ("tokens", self._tokens)):
            if buckets is not None and (wait_s := buckets.wait_s(tenant)) > 0:
                raise Overloaded(
                    f"{tenant or 'everybody'} has used up the {what} a minute; ask again in {math.ceil(wait_s)} s",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        if self._requests is not None:
            self._requests.take(tenant, 1)

    def release(self, request: Request) -> None:
        if self._tokens is not None:
            self._tokens.take(request.tenant, request.num_prompt_tokens + request.num_output_tokens)


def _buckets(per_minute: float | None, burst_s: float) -> Buckets | None:
    return None if per_minute is None else Buckets(per_minute / 60, per_minute / 60 * burst_s)


@plugin
def register_admission(register: Register) -> None:
    register("token-bucket", TokenBucket, config=Options, doc="So many requests and tokens a minute for each tenant.")
