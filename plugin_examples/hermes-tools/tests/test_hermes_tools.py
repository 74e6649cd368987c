import headrace_hermes_tools

from headrace.testing import ToolParserContract


def call(index, name, arguments):
    return {"index": index, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
NO_CALL = '<tool_call>{"nam": "weather"}</tool_call>'


class TestHermes(ToolParserContract):
    plugin = headrace_hermes_tools
    answers = (
        ("Two < three, and <tool is no call.", {"content": "Two < three, and <tool is no call."}),
        (WEATHER, {"tool_calls": [call(0, "weather", '{"city": "Ulm", "days": 2}')]}),
        (
            f'I look.\n{WEATHER}\n<tool_call>{{"name": "now"}}</tool_call> Done.',
            {
                "content": "I look.\n\n Done.",
                "tool_calls": [call(0, "weather", '{"city": "Ulm", "days": 2}'), call(1, "now", "{}")],
            },
        ),
        # What is no call, or not complete, was said and must be seen.
        (NO_CALL, {"content": NO_CALL}),
        (WEATHER[:40], {"content": WEATHER[:40]}),
        ('<tool_call>["name"]</tool_call>', {"content": '<tool_call>["name"]</tool_call>'}),
    )


def test_text_before_a_call_is_told_before_the_call_is_complete():
    stream = headrace_hermes_tools.Stream()
    assert stream.feed(f"I look. {WEATHER[:-1]}") == [{"content": "I look. "}]
    (told,) = stream.feed(">")
    assert told["tool_calls"][0]["id"].startswith("call_")


def test_a_long_call_that_comes_in_pieces_is_searched_only_where_it_is_new():
    stream = headrace_hermes_tools.Stream()
    stream.feed("<tool_call>" + "x" * 10_000)
    assert stream.seen > 9_900
    (told,) = stream.feed("</tool_call>")
    assert len(told["content"]) == 10_000 + len("<tool_call></tool_call>")
