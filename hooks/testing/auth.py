"""The contract of the slot `auth`: who is known is named, everybody else is refused, and nothing makes it fail."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st

from .contract import Contract, ensure, skip
from .loop import on_loop

SCOPES = frozenset({"infer", "models", "metrics", "admin"})
Headers = Mapping[bytes, bytes]


class AuthContract(Contract):
    """Asks who sent certain headers.

    Attributes:
        good: pairs of headers and the tenant they are of.
        bad: headers that must be refused.
        anonymous: requests without credentials are let in.
    """

    slot = "auth"
    good: ClassVar[Sequence[tuple[Headers, str]]] = ()
    bad: ClassVar[Sequence[Headers]] = ()
    anonymous: ClassVar[bool] = False

    def identified(self, headers: Headers, auth: Any = None) -> str | None:
        """Who sent *headers*; None: refused."""

        async def ask() -> str | None:
            answer = (auth or self.build()).identify(headers)
            ensure(inspect.isawaitable(answer), f"identify must be async, it returned {answer!r}")
            try:
                tenant = await answer
            except Exception as error:
                ensure(False, f"identify must refuse by None, it raised {type(error).__name__} for {headers}")
            ensure(
                tenant is None or (isinstance(tenant, str) and tenant),
                f"identify must return a name or None, found {tenant!r}",
            )
            found: str | None = tenant
            return found

        return on_loop(ask, patience_s=10)

    def test_who_is_known_is_named(self) -> None:
        if not self.good:
            skip("set good = [(headers, tenant), …]")
        for headers, wanted in self.good:
            found = self.identified(headers)
            ensure(found == wanted, f"{headers} must be of {wanted}, found {found!r}")

    def test_who_is_not_known_is_refused(self) -> None:
        for headers in self.bad:
            found = self.identified(headers)
            ensure(found is None, f"{headers} must be refused, found {found!r}")

    def test_nobody_is_refused(self) -> None:
        """Without any header, and with those every client sends."""
        for headers in (
            {},
            {b"host": b"a", b"user-agent": b"curl", b"authorization": b"Bearer "},
            {b"authorization": b""},
        ):
            found = self.identified(headers)
            ensure(self.anonymous or found is None, f"{headers} must be refused, found {found!r}")

    def test_headers_of_any_kind_are_refused(self) -> None:
        """Bytes that are no text, schemes nobody knows, several values in one."""
        auth = self.build()
        known = {_key(headers) for headers, _ in self.good}

        def check(headers: dict[bytes, bytes]) -> None:
            found = self.identified(headers, auth)
            if not self.anonymous and _key(headers) not in known:
                ensure(found is None, f"{headers} must be refused, found {found!r}")

        names = st.sampled_from([b"authorization", b"x-api-key", b"cookie", b"x-forwarded-for"])
        schemes = st.sampled_from([b"", b"Bearer ", b"bearer", b"Basic ", b"Bearer Bearer ", b"\xff"])
        values = st.tuples(schemes, st.binary(max_size=12)).map(b"".join)
        self.for_all(st.dictionaries(names, values, max_size=4), check=check)

    def test_almost_the_right_credentials_are_refused(self) -> None:
        """One byte more, one less, or another one."""
        auth = self.build()
        known = {_key(headers) for headers, _ in self.good}

        def check(which: int, change: str, place: int) -> None:
            headers, _ = self.good[which % len(self.good)]
            name = max(headers, key=lambda each: len(headers[each]))
            changed = {**headers, name: _changed(headers[name], change, place)}
            if _key(changed) not in known:
                found = self.identified(changed, auth)
                ensure(found is None, f"{changed} must be refused, found {found!r}")

        if not self.good:
            skip("set good = [(headers, tenant), …]")
        changes = st.sampled_from(["longer", "shorter", "other"])
        self.for_all(st.integers(0, 99), changes, st.integers(0, 8), check=check)

    def test_it_leaves_the_headers_as_they_are(self) -> None:
        for headers in [each for each, _ in self.good] + [{b"authorization": b"Bearer x"}]:
            given = dict(headers)
            self.identified(given)
            ensure(given == headers, f"identify must not change the headers, found {given}")

    def test_scopes_are_known_ones(self) -> None:
        """Of each tenant; without the method, a tenant has all but `admin`."""
        auth = self.build()
        for _, tenant in self.good if hasattr(auth, "scopes") else ():
            found = auth.scopes(tenant)
            wrong = isinstance(found, str) or not all(isinstance(each, str) for each in found)
            ensure(not wrong, f"scopes must return a collection of strings, found {found!r}")
            unknown = sorted(set(found) - SCOPES)
            ensure(
                not unknown, f"scopes of {tenant} must be of {', '.join(sorted(SCOPES))}, found {', '.join(unknown)}"
            )


def _key(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(sorted((name, value.strip()) for name, value in headers.items()))


def _changed(value: bytes, change: str, place: int) -> bytes:
    """*value* with something else at its end, where the secret is."""
    match change:
        case "longer":
            return value + b"x"
        case "shorter":
            return value[: -1 - place % 3]
    place = len(value) - 1 - place % 3
    return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
