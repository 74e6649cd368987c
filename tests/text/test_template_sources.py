"""Where a chat template comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks.errors import BadRequest, ConfigError, ModelError
from headrace.hooks.messages import ChatPrompt
from headrace.hooks.protocols import Context
from headrace.plugins.jinja_template import TemplateOptions, find_templates, jinja
from headrace.plugins.tokenizer import ModelTokenizer
from tests.text.checkpoints import WordsOnly, build, sentencepiece

HELLO = ChatPrompt(messages=({"role": "user", "content": "Hi."},))


def test_a_gguf_file_holds_a_default_and_named_ones() -> None:
    metadata = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert find_templates(WordsOnly(metadata=metadata)) == {"default": "a", "tool_use": "b"}


def test_a_file_of_its_own_outranks_the_older_places(tmp_path: Path) -> None:
    checkpoint = WordsOnly(folder=tmp_path)
    assert find_templates(checkpoint) == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert find_templates(checkpoint) == {"default": "config"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert find_templates(checkpoint) == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert find_templates(checkpoint) == {"default": "jinja"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert find_templates(checkpoint) == {"default": "jinja", "tool_use": "tools"}


def test_a_config_can_hold_a_list_of_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find_templates(WordsOnly(folder=tmp_path)) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("content", [7, ["a"], [{"name": "default"}]])
def test_a_config_with_something_else_in_its_place_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": content}))
    with pytest.raises(ModelError, match="chat_template must be"):
        find_templates(WordsOnly(folder=tmp_path))


def test_without_a_template_a_chat_is_a_bad_request_that_says_what_to_do(smollm2: ModelTokenizer) -> None:
    found = jinja(Context(checkpoint=WordsOnly(), tokenizer=smollm2), TemplateOptions())
    with pytest.raises(BadRequest, match=r"found none; use completions, or configure a template"):
        found.render(HELLO)


def test_a_configured_file_is_used_instead(smollm2: ModelTokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine: {{ eos_token }}", "utf-8")
    context = Context(checkpoint=WordsOnly(metadata={"tokenizer.chat_template": "theirs"}), tokenizer=smollm2)
    found = jinja(context, TemplateOptions(file=str(tmp_path / "mine.jinja")))
    assert found.render(HELLO).text == "mine: <|im_end|>"


def test_a_configured_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        jinja(Context(checkpoint=WordsOnly()), TemplateOptions(file=str(tmp_path / "nosuch.jinja")))


def test_a_folder_gives_the_names_of_its_special_tokens_to_its_template(tmp_path: Path) -> None:
    checkpoint = sentencepiece(tmp_path, chat_template="{{ bos_token }}|{{ eos_token }}", add_bos_token=True)
    context = Context(checkpoint=checkpoint, tokenizer=build(checkpoint))
    assert jinja(context, TemplateOptions()).render(HELLO).text == "<s>|</s>"
