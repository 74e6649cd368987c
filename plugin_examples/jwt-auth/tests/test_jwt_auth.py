import hmac
import json
from base64 import urlsafe_b64encode
from importlib.util import find_spec

import pytest

from headrace.hooks.errors import ConfigError
from headrace.testing import AuthContract

pytestmark = pytest.mark.skipif(find_spec("jwt") is None, reason="needs pyjwt: pip install pyjwt")

KEY = "a shared secret that is long enough for every algorithm, which takes 64 bytes"
LATER = 4102444800  # The first second of 2100.
EARLIER = 946684800
OPTIONS = {"audience": "headrace", "admins": ["root"]}


def signed(claims, key=KEY, algorithm="HS256"):
    """A token as RFC 7515 says, by nobody's library."""
    header = {"typ": "JWT", "alg": algorithm}
    parts = [part(json.dumps(each).encode()) for each in (header, claims)]
    digest = {"HS256": "sha256", "HS512": "sha512"}.get(algorithm)
    signature = hmac.digest(key.encode(), b".".join(parts), digest) if digest else b""
    return b".".join([*parts, part(signature)])


def part(data):
    return urlsafe_b64encode(data).rstrip(b"=")


CLAIMS = {"exp": LATER, "sub": "ada", "aud": "headrace"}


def bearer(key=KEY, algorithm="HS256", scheme=b"Bearer", **claims):
    return {b"authorization": scheme + b" " + signed(CLAIMS | claims, key, algorithm)}


def without(name):
    return {b"authorization": b"Bearer " + signed({each: CLAIMS[each] for each in CLAIMS if each != name})}


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("JWT_KEY", KEY)


class TestJwt(AuthContract):
    plugin = "headrace_jwt_auth"
    options = OPTIONS
    good = ((bearer(), "ada"), (bearer(scheme=b"bearer", sub="root"), "root"))
    bad = (
        bearer(key=KEY[::-1]),
        bearer(algorithm="HS512"),
        bearer(algorithm="none"),
        bearer(exp=EARLIER),
        bearer(nbf=LATER),
        bearer(aud="another service"),
        bearer(sub=""),
        without("exp"),
        without("sub"),
        without("aud"),
        {b"authorization": bearer()[b"authorization"].replace(b"Bearer", b"Basic")},
        {b"x-api-key": bearer()[b"authorization"]},
    )


def test_only_those_named_may_administer():
    auth = TestJwt().build()
    assert "admin" in auth.scopes("root")
    assert set(auth.scopes("ada")) == {"infer", "models", "metrics"}


def test_a_token_has_one_spelling():
    import headrace_jwt_auth

    token = bearer()[b"authorization"].removeprefix(b"Bearer ")
    # The last character of a signature of 32 bytes has two bits that mean nothing.
    spellings = [token[:-1] + bytes([character]) for character in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    assert headrace_jwt_auth.canonical(token)
    assert sum(map(headrace_jwt_auth.canonical, spellings)) < len(spellings) / 2


@pytest.mark.parametrize(("found", "algorithm"), [("", "HS256"), ("too short", "HS256"), (KEY, "RS256")])
def test_its_start_fails_without_a_key_that_fits(found, algorithm, monkeypatch):
    monkeypatch.setenv("JWT_KEY", found)
    contract = type("One", (TestJwt,), {"options": {"algorithms": [algorithm]}})
    with pytest.raises(ConfigError, match=r"^jwt: .*(JWT_KEY|32 bytes)"):
        contract().build()
