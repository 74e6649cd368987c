"""Auth `jwt`: takes `Authorization: Bearer TOKEN` with a signed JSON Web Token; its subject is the tenant.

A token must say who (`sub`) and until when (`exp`). Algorithms are the operator's choice, never the token's.

Source: RFC 7519; Sheffer, Hardt and Jones 2020, JSON Web Token Best Current Practices, RFC 8725; PyJWT.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import jwt
from jwt.utils import base64url_decode, base64url_encode
from msgspec import Meta, Struct

import headrace
from headrace.hooks.errors import ConfigError

headrace_api = 1

Algorithm = Literal["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"]


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key_env: Annotated[str, Meta(min_length=1)] = "JWT_KEY"
    """The environment variable with the shared secret, or with the public key as PEM."""
    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1)] = ("HS256",)
    audience: str | None = None
    issuer: str | None = None
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 10.0
    """Seconds by which clocks may differ."""
    admins: tuple[str, ...] = ()
    """Subjects that may do everything; others have all scopes but `admin`."""


class Jwt:
    def __init__(self, context, options):
        self.key = os.environ.get(options.key_env, "")
        if not self.key:
            raise ConfigError(f"jwt: the key must stand in the variable {options.key_env}, which is empty")
        self.options = options
        for algorithm in options.algorithms:
            self.try_out(algorithm)

    def try_out(self, algorithm):
        """At start, for a key that does not fit would only ever refuse."""
        if algorithm.startswith("HS") and len(self.key.encode()) * 8 < int(algorithm[2:]):
            raise ConfigError(f"jwt: the secret of {algorithm} must have at least {int(algorithm[2:]) // 8} bytes")
        try:
            jwt.get_algorithm_by_name(algorithm).prepare_key(self.key)
        except (jwt.PyJWTError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"jwt: {self.options.key_env} must hold a key for {algorithm}: {error}") from None

    async def identify(self, headers):
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer" or not canonical(token):
            return None
        try:
            claims = jwt.decode(
                token,
                self.key,
                algorithms=list(self.options.algorithms),
                audience=self.options.audience,
                issuer=self.options.issuer,
                leeway=self.options.leeway_s,
                options={"require": ["exp", "sub"]},
            )
        except (jwt.PyJWTError, ValueError):
            return None
        return claims["sub"] or None

    def scopes(self, tenant):
        own = ("infer", "models", "metrics")
        return (*own, "admin") if tenant in self.options.admins else own


def canonical(token):
    """Whether each part is written as base64 writes it: else one token has several spellings."""
    try:
        return all(base64url_encode(base64url_decode(part)) == part for part in token.split(b"."))
    except ValueError:
        return False


@headrace.plugin
def register_auth(register):
    register("jwt", Jwt, config=Options, doc="Bearer tokens that are signed JSON Web Tokens.")
