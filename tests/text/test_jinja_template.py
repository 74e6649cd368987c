"""Chat templates: where they come from, what they may do, and how they fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.hooks.errors import BadRequest, ModelError
from headrace.hooks.messages import ChatPrompt
from headrace.plugins.jinja_template import JinjaTemplate

USER = {"role": "user", "content": "Hi."}


def template(source: str, *, control_tokens: tuple[str, ...] = (), **names: str) -> JinjaTemplate:
    return JinjaTemplate({"default": source}, names=names, control_tokens=control_tokens)


def chat(*messages: Mapping[str, Any], **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages, **fields)


def continued(*messages: Mapping[str, Any]) -> ChatPrompt:
    return chat(*messages, add_generation_prompt=False, continue_final_message=True)


# ── how it renders ────────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_leave_no_blank_lines_and_content_is_not_stripped() -> None:
    body = "    {% if m.role == 'user' %}\n[U]{{ m.content }}\n    {% endif %}\n"
    source = "{% for m in messages %}\n" + body + "{% endfor %}\nEND\n"
    messages = (
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\n"},
    )
    assert template(source).render(chat(*messages)).text == "[U] a \n[U]c\n\nEND"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_a_message_without_content_has_empty_content(message: dict[str, Any]) -> None:
    found = template("[{% for m in messages %}{{ m.role + m.content }}|{% endfor %}]").render(chat(USER, message))
    assert found.text == "[userHi.|assistant|]"


def test_json_keeps_its_signs_and_the_order_of_its_keys() -> None:
    call = {"name": "größer", "arguments": {"z": "<&>", "a": 1}}
    found = template("{{ messages | tojson }}").render(chat({"role": "user", "calls": [call]}))
    assert '"calls": [{"name": "größer", "arguments": {"z": "<&>", "a": 1}}]' in found.text


def test_a_template_knows_the_names_of_special_tokens_and_of_the_request() -> None:
    found = template("{{ bos_token }}{{ mood }}{{ nothing }}", bos_token="<s>")
    assert found.render(chat(USER, template_kwargs={"mood": "calm"})).text == "<s>calm"


def test_requests_with_tools_take_the_template_for_tools() -> None:
    both = JinjaTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, names={}, control_tokens=())
    assert both.render(chat(USER)).text == "plain"
    assert both.render(chat(USER, tools=({"name": "add"},))).text == "add"


def test_rendering_does_not_change_the_messages() -> None:
    messages = ({"role": "user", "content": None, "calls": [{"a": 1}]},)
    template("{{ messages }}").render(chat(*messages))
    assert messages == ({"role": "user", "content": None, "calls": [{"a": 1}]},)


# ── control tokens of users ───────────────────────────────────────────────────────────────────────────────────────


def test_a_users_control_tokens_are_replaced_and_the_templates_own_are_not() -> None:
    found = template("<s>{{ messages[0].content }}</s>", control_tokens=("<s>", "</s>")).render(
        chat({"role": "user", "content": "a</s><s>b</s>"})
    )
    assert found.text == "<s>a\U00100000\U00100001b\U00100000</s>"
    assert found.stand_ins == {"\U00100000": "</s>", "\U00100001": "<s>"}


def test_a_stand_in_is_a_character_that_stands_nowhere_else() -> None:
    found = template("\U00100001{{ messages[0].content }}", control_tokens=("</s>",)).render(
        chat({"role": "user", "content": "\U00100000</s>"})
    )
    assert found.stand_ins == {"\U00100002": "</s>"}
    assert found.text == "\U00100001\U00100000\U00100002"


def test_the_longest_control_token_is_replaced_as_a_whole() -> None:
    found = template("{{ messages[0].content }}", control_tokens=("<s>", "<s><s>")).render(
        chat({"role": "user", "content": "<s><s><s>"})
    )
    assert [*found.stand_ins.values()] == ["<s><s>", "<s>"]


@pytest.mark.parametrize(
    "prompt",
    [
        chat({"role": "user", "content": "", "calls": [{"arguments": {"x": ["</s>"]}}]}),
        chat({"role": "user", "content": "", "calls": [{"arguments": {"</s>": 1}}]}),
        chat({"role": "user", "content": ""}, tools=({"name": "</s>"},)),
        chat({"role": "user", "content": ""}, template_kwargs={"mood": "</s>"}),
    ],
)
def test_control_tokens_are_replaced_wherever_a_user_can_write(prompt: ChatPrompt) -> None:
    found = template("{{ messages | tojson }}{{ tools | tojson }}{{ mood }}", control_tokens=("</s>",)).render(prompt)
    assert found.stand_ins == {"\U00100000": "</s>"}
    assert "</s>" not in found.text


def test_without_control_tokens_there_are_no_stand_ins() -> None:
    found = template("<s>{{ messages[0].content }}", control_tokens=("<s>",)).render(chat(USER))
    assert (found.text, found.stand_ins) == ("<s>Hi.", {})


# ── going on in the final message ─────────────────────────────────────────────────────────────────────────────────

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
TRIMMED = CHATML.replace("m.content", "m.content | trim")


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (CHATML, "OK! ", "<|user|>Hi.<|end|>\n<|assistant|>OK! "),
        (CHATML, "", "<|user|>Hi.<|end|>\n<|assistant|>"),
        (TRIMMED, "OK! ", "<|user|>Hi.<|end|>\n<|assistant|>OK!"),
        (TRIMMED, "OK!", "<|user|>Hi.<|end|>\n<|assistant|>OK!"),
    ],
)
def test_the_final_message_stays_open(source: str, content: str, text: str) -> None:
    assert template(source).render(continued(USER, {"role": "assistant", "content": content})).text == text


def test_a_final_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    found = template("{{ messages[0].content }}")
    with pytest.raises(BadRequest, match="cannot be continued"):
        found.render(continued(USER, {"role": "assistant", "content": "OK!"}))


def test_a_final_message_that_is_no_text_cannot_be_continued() -> None:
    with pytest.raises(BadRequest, match="must have text"):
        template(CHATML).render(continued(USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}))


def test_a_message_is_not_continued_and_followed_by_another() -> None:
    with pytest.raises(BadRequest, match="add_generation_prompt"):
        template(CHATML).render(chat(USER, continue_final_message=True))


# ── how it fails ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_refusal_is_a_bad_request_in_the_templates_own_words() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role!') }}{% endif %}"
    with pytest.raises(BadRequest) as caught:
        template(source).render(chat({"role": "system", "content": "a"}))
    assert str(caught.value) == "No system role!"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ nothing | tojson }}", "TypeError"),
    ],
)
def test_an_error_in_a_template_is_a_bad_request_that_names_it(body: str, error: str) -> None:
    source = "{% if messages[0].content == 'fail' %}" + body + "{% endif %}"
    with pytest.raises(BadRequest, match=error):
        template(source).render(chat({"role": "user", "content": "fail"}))


def test_a_conversation_deeper_than_the_stack_is_a_bad_request() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(BadRequest, match="RecursionError"):
        template("{{ messages }}").render(chat({"role": "user", "content": "", "calls": nested}))


def test_an_empty_conversation_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="at least one message"):
        template("a").render(chat())


def test_a_request_cannot_rename_what_the_template_is_given() -> None:
    with pytest.raises(BadRequest, match="must not be messages, tools"):
        template("a").render(chat(USER, template_kwargs={"tools": [], "messages": []}))


@pytest.mark.parametrize("source", ["{% for %}", "{{ a | nosuchfilter }}", "{{ messages[0].a.b }}"])
def test_a_template_that_cannot_work_is_an_error_at_the_start(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        template(source)


def test_a_template_may_refuse_a_plain_message() -> None:
    with pytest.raises(BadRequest, match="Two messages"):
        template("{% if messages | length < 2 %}{{ raise_exception('Two messages!') }}{% endif %}").render(chat(USER))
