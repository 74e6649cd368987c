import json

import headrace_json_end
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.testing import StopContract

ON = {"on": True}


class TestJsonEnd(StopContract):
    plugin = headrace_json_end
    params = (ON, {})
    ends = (
        (ON, '{"a": [1, {"b": "}"}]}'),
        (ON, 'Here it is: ["]", "\\"]", "\\\\"]'),
        (ON, "[[]]"),
    )
    goes_on = ((ON, '{"a": "}'), (ON, "A } or a ] without a beginning"), ({}, "{}"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@settings(derandomize=True, database=None, deadline=None)
@given(values.filter(lambda value: isinstance(value, list | dict)), st.booleans())
def test_any_value_that_json_writes_ends_at_its_last_character(value, ascii_only):
    watcher = headrace_json_end.Watcher()
    *before, last = json.dumps(value, ensure_ascii=ascii_only)
    assert not any(watcher.feed(character, 0) for character in before)
    assert watcher.feed(last, 0)
