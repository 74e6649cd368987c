"""Messages as templates see them."""

import msgspec
import pytest

from headrace.server.schemas import ChatBody


def rendered(**message: object) -> dict[str, object]:
    body = msgspec.json.decode(msgspec.json.encode({"messages": [message]}), type=ChatBody)
    return dict(body.prompt().messages[0])


def test_parts_of_text_are_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(role="user", content=parts) == {"role": "user", "content": "a\nb"}
    assert rendered(role="user", content=parts[:1]) == rendered(role="user", content="a")


@pytest.mark.parametrize("fields", [{}, {"content": None}])
def test_missing_content_is_an_empty_string(fields):
    assert rendered(role="assistant", **fields) == {"role": "assistant", "content": ""}


def test_a_developer_is_a_system_to_templates():
    assert rendered(role="developer", content="x") == {"role": "system", "content": "x"}


def test_the_arguments_of_a_call_are_an_object_where_they_are_one():
    def call(arguments):
        function = {"name": "add", "arguments": arguments}
        message = rendered(role="assistant", tool_calls=[{"id": "1", "type": "function", "function": function}])
        return message["tool_calls"][0]["function"]["arguments"]

    assert call('{"a": 2}') == {"a": 2}
    assert call("not json") == "not json"
    assert call({"a": 2}) == {"a": 2}


def test_a_tools_answer_keeps_the_id_of_its_call():
    message = rendered(role="tool", tool_call_id="call_1", content="5")
    assert message == {"role": "tool", "content": "5", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    ("fields", "opens", "goes_on"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
def test_the_last_turn_is_opened_or_gone_on_with(fields, opens, goes_on):
    raw = msgspec.json.encode({"messages": [{"role": "assistant", "content": "OK! "}], **fields})
    prompt = msgspec.json.decode(raw, type=ChatBody).prompt()
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (opens, goes_on)
    assert prompt.messages[0]["content"] == "OK! "


def test_tools_and_template_arguments_reach_the_template():
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user"}], "tools": tools, "chat_template_kwargs": {"thinking": False}}
    prompt = msgspec.json.decode(msgspec.json.encode(body), type=ChatBody).prompt()
    assert prompt.tools == tuple(tools)
    assert prompt.template_kwargs == {"thinking": False}
