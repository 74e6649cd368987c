"""The contract of chat templates: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.hooks.errors import BadRequest
from headrace.hooks.protocols import Context
from headrace.hooks.testing.chat_template import Markers
from headrace.hooks.testing.contract import run
from headrace.plugins.jinja_template import JinjaTemplate
from headrace.testing import ChatTemplateContract
from tests.kit.faults import contract_of, failures

SOURCE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
GOLDENS = [
    (HELLO, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"),
    ({"messages": HELLO, "add_generation_prompt": False}, "<|im_start|>user\nHello<|im_end|>\n"),
]


class TestJinja(ChatTemplateContract):
    """The built-in, with the template that its tokenizer's model would bring."""

    plugin = "jinja-template"
    goldens = GOLDENS

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        path = tmp_path / "chatml.jinja"
        path.write_text(SOURCE)
        type(self).options = {"file": str(path)}

    def context(self):
        return Context(tokenizer=Markers(self.markers), checkpoint=object())


class Good(JinjaTemplate):
    def __init__(self):
        super().__init__({"default": SOURCE}, names={}, control_tokens=ChatTemplateContract.markers)


class Spaced(Good):
    def __init__(self):
        JinjaTemplate.__init__(
            self, {"default": SOURCE.replace("\n{{", "\n {{")}, names={}, control_tokens=ChatTemplateContract.markers
        )


class Trusting(Good):
    def __init__(self):
        JinjaTemplate.__init__(self, {"default": SOURCE}, names={}, control_tokens=())


class Grows(Good):
    """Keeps what was said to it."""

    text = ""

    def render(self, prompt):
        rendered = super().render(prompt)
        self.text += rendered.text
        return replace(rendered, text=self.text)


class Pops(Good):
    def render(self, prompt):
        prompt.messages[-1]["seen"] = True
        return super().render(prompt)


class Fixed(Good):
    """One stand-in for all, which a user may type too."""

    def render(self, prompt):
        marker, free = "<|im_start|>", chr(0x100000)
        messages = [{**m, "content": m["content"].replace(marker, free)} for m in prompt.messages]
        rendered = super().render(replace(prompt, messages=tuple(messages)))
        return replace(rendered, stand_ins={**rendered.stand_ins, free: marker})


def rendering(change):
    return type("Faulty", (Good,), {"render": lambda self, prompt: change(Good.render(self, prompt), prompt)})


def strict(rendered, prompt):
    {"user": 1, "assistant": 2, "system": 3}[prompt.messages[0]["role"]]
    return rendered


def short(rendered, prompt):
    return replace(rendered, text="".join(c for c in rendered.text if ord(c) < 128 or ord(c) >= 0x100000))


def closed(rendered, prompt):
    return replace(rendered, text=rendered.text + "<|im_end|>") if prompt.continue_final_message else rendered


FAULTS = [
    ("test_golden_chats_are_rendered_word_for_word", Spaced),
    ("test_markers_that_users_type_stay_text", Trusting),
    ("test_markers_that_users_type_stay_text", rendering(lambda rendered, prompt: replace(rendered, stand_ins={}))),
    ("test_stand_ins_are_not_in_the_messages", Fixed),
    ("test_nothing_that_was_said_is_lost", rendering(short)),
    ("test_it_refuses_with_bad_request_only", rendering(strict)),
    ("test_it_refuses_with_bad_request_only", rendering(lambda rendered, prompt: rendered.text)),
    ("test_rendering_changes_nothing", Grows),
    ("test_rendering_changes_nothing", Pops),
    ("test_a_message_to_be_continued_stays_open", rendering(closed)),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("chat_template", Good, goldens=GOLDENS)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("chat_template", component, goldens=GOLDENS), [test])


def test_a_template_that_refuses_keeps_the_contract():
    def no_system(rendered, prompt):
        if prompt.messages[0]["role"] != "user":
            raise BadRequest("the first message must be the user's")
        return rendered

    assert failures(contract_of("chat_template", rendering(no_system), goldens=GOLDENS)) == {}
