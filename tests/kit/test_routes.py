"""The contract of routes: what it lets pass, and what it catches."""

from __future__ import annotations

import json

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from headrace.hooks.testing.contract import run
from tests.kit.faults import contract_of, failures


async def hello(request):
    return PlainTextResponse("hello")


async def double(request):
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError):
        return PlainTextResponse("must be JSON", status_code=400)
    return PlainTextResponse(str(value)[:10])


async def item(request):
    return PlainTextResponse(request.path_params["name"][:5])


def routes(*rows):
    return type("Routes", (), {"routes": lambda self: list(rows)})


ROWS = (
    Route("/hello", hello),
    Route("/double", double, methods=["POST"]),
    Mount("/items", routes=[Route("/{name}", item)]),
)
ASKS = [("GET", "/hello", b"", 200, b"hello"), ("POST", "/double", b"[1]", 200, b"[1]")]


async def trusting(request):
    return PlainTextResponse(str(await request.json()))


async def number(request):
    return PlainTextResponse(str(int(request.path_params["name"])))


async def broken(request):
    return PlainTextResponse("broken", status_code=500)


FAULTS = [
    ("test_they_are_routes", routes()),
    ("test_they_are_routes", routes(("/hello", hello))),
    ("test_no_two_are_the_same", routes(*ROWS, Route("/hello", item))),
    ("test_they_answer_as_they_should", routes(*ROWS, Route("/broken", broken))),
    ("test_they_answer_as_they_should", routes(*ROWS[1:])),
    ("test_bodies_of_any_kind_are_answered", routes(Route("/double", trusting, methods=["POST"]))),
    ("test_parameters_of_any_kind_are_answered", routes(Mount("/items", routes=[Route("/{name}", number)]))),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("routes", routes(*ROWS), asks=ASKS)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("routes", component, asks=ASKS), [test])
