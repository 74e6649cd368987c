"""Auth `static-keys`: a fixed set of API keys, each with a name and scopes.

    [server.auth]
    use = "static-keys"
    options.keys = [
      { name = "app", key = { env = "APP_KEYS" } },
      { name = "ops", key = { file = "/run/secrets/ops" }, scopes = ["metrics", "admin"] },
    ]

Keys are read from the environment or from files and never stand in the configuration. Only their digests are kept.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from ..hooks.errors import StartError
from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin

headrace_api = 1

BEARER: Final = b"bearer "


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where keys are: an environment variable or a file; several are separated by spaces or lines."""

    env: str = ""
    file: str = ""

    def read(self) -> list[bytes]:
        """The keys.

        Raises:
            StartError: there are none.
        """
        if bool(self.env) == bool(self.file):
            raise StartError('static-keys: a key must be { env = "NAME" } or { file = "PATH" }, one of the two')
        if self.env:
            place, text = f"the environment variable {self.env}", os.environ.get(self.env, "")
        else:
            place = f"the file {self.file}"
            try:
                text = Path(self.file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise StartError(f"static-keys: {place} must hold a key, and cannot be read: {error}") from None
        if not text.split():
            raise StartError(f"static-keys: {place} must hold a key, and is empty or missing")
        return [key.encode() for key in text.split()]


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who has it and what it opens. Keys of one name share a prefix cache."""

    name: Annotated[str, Meta(min_length=1)]
    key: Source
    scopes: tuple[Literal["infer", "models", "metrics", "admin"], ...] = ("infer", "models", "metrics")


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[Key, ...], Meta(min_length=1)]


class StaticKeys:
    """Takes `Authorization: Bearer KEY` or `x-api-key: KEY`."""

    def __init__(self, context: Context, options: Options) -> None:
        self._names: dict[bytes, str] = {}
        self._scopes: dict[str, frozenset[str]] = {}
        for each in options.keys:
            for key in each.key.read():
                owner = self._names.setdefault(sha256(key).digest(), each.name)
                if owner != each.name:
                    raise StartError(
                        f"static-keys: {owner} and {each.name} must have different keys, found one of both"
                    )
            if self._scopes.setdefault(each.name, frozenset(each.scopes)) != frozenset(each.scopes):
                raise StartError(f"static-keys: all keys called {each.name} must have the same scopes")

    async def identify(self, headers: Mapping[bytes, bytes]) -> str | None:
        found = None
        for key in _presented(headers):
            digest = sha256(key).digest()
            # All are compared, whichever matches: the time taken tells nothing.
            for known, name in self._names.items():
                if hmac.compare_digest(digest, known):
                    found = name
        return found

    def scopes(self, tenant: str) -> frozenset[str]:
        """What the keys called *tenant* open."""
        return self._scopes[tenant]


def _presented(headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
    authorization = headers.get(b"authorization", b"")
    if authorization[: len(BEARER)].lower() == BEARER:
        yield authorization[len(BEARER) :].strip()
    if b"x-api-key" in headers:
        yield headers[b"x-api-key"].strip()


@plugin
def register_auth(register: Register) -> None:
    register("static-keys", StaticKeys, config=Options, doc="A fixed set of API keys with scopes.")
