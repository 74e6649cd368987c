"""The contract of auth: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest

from headrace.hooks.testing.contract import run
from headrace.testing import AuthContract
from tests.kit.faults import contract_of, failures

GOOD = [({b"authorization": b"Bearer abcdef"}, "app"), ({b"x-api-key": b"abcdef"}, "app")]
OPTIONS = {"keys": [{"name": "app", "key": {"env": "KIT_KEYS"}}]}
BAD = [{b"authorization": b"Bearer nobody"}]


class TestStaticKeys(AuthContract):
    plugin = "static-keys"
    options = OPTIONS
    good = GOOD
    bad = BAD

    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch):
        monkeypatch.setenv("KIT_KEYS", "abcdef")


class Good:
    async def identify(self, headers):
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ") or headers.get(b"x-api-key")
        return "app" if given is not None and self.knows(given) else None

    def knows(self, key):
        return key == b"abcdef"

    def scopes(self, tenant):
        return {"infer", "models"}


def identifying(identify):
    return type("Faulty", (Good,), {"identify": identify})


def knowing(knows):
    return type("Faulty", (Good,), {"knows": lambda self, key: knows(key)})


async def guest(self, headers):
    return await Good.identify(self, headers) or (None if headers.get(b"authorization") else "guest")


async def text(self, headers):
    headers.get(b"authorization", b"").decode("ascii")
    return await Good.identify(self, headers)


async def true(self, headers):
    return await Good.identify(self, headers) == "app" or None


async def pops(self, headers):
    found = await Good.identify(self, headers)
    headers.pop(b"authorization", None)
    return found


FAULTS = [
    ("test_who_is_known_is_named", knowing(lambda key: False)),
    ("test_who_is_known_is_named", identifying(true)),
    ("test_who_is_known_is_named", identifying(lambda self, headers: "app")),
    ("test_who_is_not_known_is_refused", knowing(lambda key: True)),
    ("test_nobody_is_refused", identifying(guest)),
    ("test_headers_of_any_kind_are_refused", identifying(text)),
    ("test_almost_the_right_credentials_are_refused", knowing(lambda key: key.startswith(b"abcdef"))),
    ("test_almost_the_right_credentials_are_refused", knowing(lambda key: b"abcdef".startswith(key[:3]))),
    ("test_it_leaves_the_headers_as_they_are", identifying(pops)),
    ("test_scopes_are_known_ones", type("Faulty", (Good,), {"scopes": lambda self, tenant: {"root"}})),
    ("test_scopes_are_known_ones", type("Faulty", (Good,), {"scopes": lambda self, tenant: "infer"})),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("auth", Good, good=GOOD, bad=BAD)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("auth", component, good=GOOD, bad=BAD), [test])
