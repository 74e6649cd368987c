"""Admission `concurrency`: so many requests at a time, in all and of each tenant. One more is refused with 429.

    [line]
    admission = [{ use = "concurrency", options = { max_requests = 100, max_requests_per_tenant = 10 } }]

A tenant is the name of a key (slot `auth`); without keys all requests are of one. The line's own limits come after it.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from msgspec import Meta, Struct

from ..hooks.errors import Overloaded
from ..hooks.messages import Request
from ..hooks.protocols import Context, Load, Register
from ..hooks.registry import plugin

headrace_api = 1

Limit = Annotated[int, Meta(ge=1)]


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_requests: Limit | None = None
    """Requests at a time. Unset: any number."""
    max_requests_per_tenant: Limit | None = None
    """Requests of one tenant at a time. Unset: any number."""
    retry_after_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """When a refused client may ask again: a guess, for nobody knows when an answer ends."""


class Concurrency:
    """Counts who is inside."""

    def __init__(self, context: Context, options: Options) -> None:
        self._options = options
        self._inside: Counter[str] = Counter()

    async def admit(self, request: Request, load: Load) -> None:
        """See `protocols.Admission`."""
        options, tenant = self._options, request.tenant
        self._check("the server", self._inside.total(), options.max_requests)
        self._check(tenant or "everybody", self._inside[tenant], options.max_requests_per_tenant)
        self._inside[tenant] += 1

    def release(self, request: Request) -> None:
        self._inside[request.tenant] -= 1
        if not self._inside[request.tenant]:
            del self._inside[request.tenant]

    def _check(self, whose: str, num_inside: int, limit: int | None) -> None:
        if limit is not None and num_inside >= limit:
            raise Overloaded(
                f"{whose} may have {limit} requests at a time, and has; wait until one of them has ended",
                code="too_many_requests",
                retry_after_s=self._options.retry_after_s,
            )


@plugin
def register_admission(register: Register) -> None:
    register("concurrency", Concurrency, config=Options, doc="So many requests at a time, in all and of each tenant.")
