import tomllib
from textwrap import dedent

import pytest

from headrace.hooks.toml_positions import positions

CASES = {
    "a key": ("x = 1\n\ny = 2", {("x",): (1, 1), ("y",): (3, 1)}),
    "an indented key": ("[a]\n  x = 1", {("a",): (1, 1), ("a", "x"): (2, 3)}),
    "a table in a table": ("[a.b]\nx = 1", {("a",): (1, 1), ("a", "b"): (1, 1), ("a", "b", "x"): (2, 1)}),
    "a dotted key": ("[a]\nb.c = 1", {("a",): (1, 1), ("a", "b"): (2, 1), ("a", "b", "c"): (2, 1)}),
    "quoted keys": ("\"a.b\".'c d' = 1", {("a.b",): (1, 1), ("a.b", "c d"): (1, 1)}),
    "an escape in a key": (r'"a\"b" = 1', {('a"b',): (1, 1)}),
    "an array of tables": (
        "[[a]]\nx = 1\n[[a]]\nx = 2",
        {("a",): (1, 1), ("a", "0"): (1, 1), ("a", "0", "x"): (2, 1), ("a", "1"): (3, 1), ("a", "1", "x"): (4, 1)},
    ),
    "a table of the last element": (
        "[[a]]\n[[a]]\n[a.b]\nx = 1",
        {("a",): (1, 1), ("a", "0"): (1, 1), ("a", "1"): (2, 1), ("a", "1", "b"): (3, 1), ("a", "1", "b", "x"): (4, 1)},
    ),
    "an inline table": ("x = { y = 1, z = { w = 2 } }\nv = 1", {("x",): (1, 1), ("v",): (2, 1)}),
    "an array over lines": ('x = [ # ]\n  "]",\n  [1],\n]\ny = 1', {("x",): (1, 1), ("y",): (5, 1)}),
    "a string over lines": ('x = """\n[no]\ny = 1\n"""\nz = 1', {("x",): (1, 1), ("z",): (5, 1)}),
    "a literal over lines": ("x = '''\n[no]\n'''\nz = 1", {("x",): (1, 1), ("z",): (4, 1)}),
    "quotes at the end of a string": ('x = """a"""""\nz = 1', {("x",): (1, 1), ("z",): (2, 1)}),
    "a hash in a string": ('x = "# \\" ]" # [no]\ny = 1', {("x",): (1, 1), ("y",): (2, 1)}),
    "comments": ("# a = 1\n  # b\nx = 1 # c\n", {("x",): (3, 1)}),
    "carriage returns": ("x = 1\r\ny = 2\r\n", {("x",): (1, 1), ("y",): (2, 1)}),
    "nothing": ("", {}),
}


@pytest.mark.parametrize(("text", "found"), CASES.values(), ids=list(CASES))
def test_positions_of(text, found):
    tomllib.loads(text)
    assert positions(text) == found


def test_every_key_of_a_long_document_is_found():
    text = dedent("""
        profile = ["a", "b"]
        [sampling]
        phases = [
            { phase = "bias", processors = ["x"] },
        ]
        sampler = { use = "y" }
        [sampling.defaults]
        stop = ["\\n", "]"]
        [[observers]]
        use = "z"
        options.interval = 1979-05-27T07:32:00Z
    """)
    found = {".".join(path): line for path, (line, _) in positions(text).items()}
    assert found == {
        "profile": 2,
        "sampling": 3,
        "sampling.phases": 4,
        "sampling.sampler": 7,
        "sampling.defaults": 8,
        "sampling.defaults.stop": 9,
        "observers": 10,
        "observers.0": 10,
        "observers.0.use": 11,
        "observers.0.options": 12,
        "observers.0.options.interval": 12,
    }
