"""Byte for byte what transformers renders, for templates of four habits and conversations of many kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from headrace.hooks.errors import BadRequest
from headrace.hooks.messages import ChatPrompt
from headrace.plugins.jinja_template import JinjaTemplate

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = Path(__file__).parent / "templates"


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, id: str = "call_1", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = message("system", "You are terse.")
ASK, ANSWER, AGAIN = message("user", "Hello!"), message("assistant", "Hi there."), message("user", "And?")
CALLS = message("assistant", "", tool_calls=[call("weather", city="Zürich", days=[1, 2], exact=True)])
TWO_CALLS = message("assistant", "", tool_calls=[call("a", "call_1", x=1.5), call("b", "call_2", y="<&'\">")])
RESULT = message("tool", '{"sky": "☁"}', tool_call_id="call_1", name="weather")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": 'Tells "the" weather <b>.', "parameters": PARAMETERS},
}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": (ASK,)},
    "one question, no turn opened": {"messages": (ASK,), "add_generation_prompt": False},
    "system": {"messages": (SYSTEM, ASK)},
    "system alone": {"messages": (SYSTEM,)},
    "empty system": {"messages": (message("system", ""), ASK)},
    "turns": {"messages": (ASK, ANSWER, AGAIN)},
    "turns after system": {"messages": (SYSTEM, ASK, ANSWER, AGAIN, ANSWER), "add_generation_prompt": False},
    "assistant first": {"messages": (ANSWER,)},
    "same role twice": {"messages": (ASK, AGAIN)},
    "unknown role": {"messages": (message("wizard", "Abracadabra"),)},
    "empty content": {"messages": (message("user", ""), message("assistant", ""), AGAIN)},
    "spaces": {"messages": (message("user", "  a\n\n"), message("assistant", "\tb "), message("user", "\r\nc"))},
    "unicode": {"messages": (message("user", "日本語 🦜 é e\u0301 \u202e \U00100000"),)},
    "braces": {"messages": (message("user", "{{ messages }} {% raw %} {# no #}"),)},
    "markup": {"messages": (message("user", "<b>&amp;</b> 'single' \"double\""),)},
    "tools": {"messages": (ASK,), "tools": (TOOL,)},
    "tools after system": {"messages": (SYSTEM, ASK), "tools": (TOOL, TOOL)},
    "tool call": {"messages": (ASK, CALLS), "tools": (TOOL,), "add_generation_prompt": False},
    "tool result": {"messages": (ASK, CALLS, RESULT), "tools": (TOOL,)},
    "two tool calls": {"messages": (ASK, TWO_CALLS)},
    "reasoning": {"messages": (ASK, message("assistant", "4", reasoning="2 + 2"), AGAIN)},
    "null fields": {"messages": (ASK, message("assistant", "ok", name=None, reasoning_content=None), AGAIN)},
    "further names": {"messages": (ASK,), "template_kwargs": {"bos_token": "<bos>", "enable_thinking": False}},
    "open answer": {"messages": (ASK, message("assistant", "OK! ")), "continue_final_message": True},
    "open answer in two lines": {"messages": (ASK, message("assistant", "\nOK!\n\n")), "continue_final_message": True},
    "open question": {"messages": (SYSTEM, ASK), "continue_final_message": True},
    "open answer said before": {
        "messages": (message("user", "Say OK!"), message("assistant", "OK!")),
        "continue_final_message": True,
    },
}


REFUSED = {
    "smollm2": set(),
    "llama3": {"two tool calls"},
    "gemma": {kind for kind in CONVERSATIONS if "system" in kind}
    | {"assistant first", "same role twice", "unknown role", "tool result", "open question"},
    "mistral": {"unknown role"},
}


def prompt(conversation: Mapping[str, Any]) -> ChatPrompt:
    open_turn = not conversation.get("continue_final_message", False)
    return ChatPrompt(**{"add_generation_prompt": open_turn, **conversation})


def reference(source: str, prompt: ChatPrompt) -> str | type[Exception]:
    """What transformers renders, or that it refuses."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=source, **NAMES)
    try:
        text = tokenizer.apply_chat_template(
            list(prompt.messages),
            tools=list(prompt.tools) or None,
            tokenize=False,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            **prompt.template_kwargs,
        )
    except TemplateError:
        return BadRequest
    assert isinstance(text, str)
    return text


def ours(template: JinjaTemplate, prompt: ChatPrompt) -> str | type[Exception]:
    try:
        return template.render(prompt).text
    except BadRequest:
        return BadRequest


@pytest.fixture(scope="module")
def sources(smollm2_metadata: Mapping[str, Any]) -> dict[str, str]:
    files = {path.stem: path.read_text("utf-8") for path in TEMPLATES.glob("*.jinja")}
    return {"smollm2": smollm2_metadata["tokenizer.chat_template"], **files}


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_rendering_is_the_references(sources: Mapping[str, str], name: str, kind: str) -> None:
    template = JinjaTemplate({"default": sources[name]}, names=NAMES, control_tokens=())
    expected = reference(sources[name], prompt(CONVERSATIONS[kind]))
    assert ours(template, prompt(CONVERSATIONS[kind])) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_the_templates_refuse_what_they_are_meant_to(sources: Mapping[str, str], name: str) -> None:
    template = JinjaTemplate({"default": sources[name]}, names=NAMES, control_tokens=())
    refused = {kind for kind, each in CONVERSATIONS.items() if ours(template, prompt(each)) is BadRequest}
    assert refused == REFUSED[name]
