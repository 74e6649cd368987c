from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct

from headrace.hooks.decode import Bytes, Use, decode, describe
from headrace.hooks.origins import Where


class Inner(Struct, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1)]
    names: tuple[str, ...] = ()


class Outer(Struct, frozen=True, forbid_unknown_fields=True):
    inner: Inner = Inner(size=1)
    several: Annotated[tuple[Inner, ...], Meta(max_length=2)] = ()
    use: Use = Use(use="a")
    table: dict[int, Annotated[float, Meta(le=1)]] = {}
    memory: Bytes | None = None


def problems_in(raw):
    problems = []
    assert decode(raw, Outer, Where(("top",)), problems) is None
    return [str(problem) for problem in problems]


def test_plain_values_become_structs():
    raw = {"inner": {"size": 3}, "several": [{"size": 1}], "use": "b", "table": {"4": 1}, "memory": "2KiB"}
    problems = []
    assert decode(raw, Outer, Where(()), problems) == Outer(
        inner=Inner(size=3), several=(Inner(size=1),), use=Use(use="b"), table={4: 1.0}, memory=Bytes(2048)
    )
    assert problems == []


@pytest.mark.parametrize(
    ("raw", "problems"),
    [
        ({"iner": {}}, ["top.iner: unknown; did you mean inner?"]),
        ({"inner": {}}, ["top.inner: size is missing"]),
        ({"inner": {"size": 0}}, ["top.inner.size: must be integer >= 1, got 0"]),
        ({"inner": 3}, ["top.inner: must be table, got 3"]),
        ({"several": [{"size": 1}, {"size": "x"}]}, ["top.several.1.size: must be integer >= 1, got 'x'"]),
        ({"several": [{"size": 1}] * 3}, ["top.several: Expected `array` of length <= 2"]),
        ({"use": 3}, ["top.use: must be component, got 3"]),
        ({"use": {"options": {}}}, ["top.use: use is missing"]),
        ({"table": {"4": 2}}, ["top.table.4: must be number <= 1, got 2"]),
        (
            {"memory": "2 lots"},
            ["top.memory: must be a number of bytes such as 1073741824, 512MiB or 2GiB, got '2 lots'"],
        ),
        (
            {"inner": {"size": 0, "names": ["a", 1]}, "x": 1, "memory": -1},
            [
                "top.x: unknown",
                "top.inner.size: must be integer >= 1, got 0",
                "top.inner.names.1: must be text, got 1",
                "top.memory: must be a number of bytes such as 1073741824, 512MiB or 2GiB, got -1",
            ],
        ),
    ],
)
def test_every_problem_is_found_with_its_path(raw, problems):
    assert problems_in(raw) == problems


def test_a_long_value_is_shortened_in_an_error():
    (problem,) = problems_in({"inner": {"size": "x" * 500}})
    assert problem.endswith("xxx...")
    assert len(problem) < 120


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("17b", 17),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("2 GiB", 2 * 1024**3),
        ("1.5MB", 1500000),
    ],
)
def test_a_number_of_bytes_is_read(text, size):
    assert Bytes.parse(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", -1, 1.5, True, None, "1 XB", "1e3", "0x10"])
def test_anything_else_is_no_number_of_bytes(text):
    with pytest.raises(ValueError, match="must be a number of bytes such as"):
        Bytes.parse(text)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (bool, "true or false"),
        (Annotated[int, Meta(ge=0, le=9)], "integer >= 0 and <= 9"),
        (Annotated[float, Meta(gt=0)] | None, "number > 0"),
        (Annotated[str, Meta(min_length=1)], "text, not empty"),
        (Literal["a", "b"], "one of a, b"),
        (tuple[Use, ...], "array of component"),
        (int | str, "integer or text"),
    ],
)
def test_a_type_is_described_for_readers(kind, words):
    assert describe(kind) == words
