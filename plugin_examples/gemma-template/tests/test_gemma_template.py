import headrace_gemma_template
import pytest

from headrace.hooks.errors import BadRequest, ConfigError
from headrace.hooks.messages import ChatPrompt
from headrace.testing import ChatTemplateContract

SYSTEM = {"role": "system", "content": "Be short."}
HELLO = {"role": "user", "content": "Hello "}
HI = {"role": "assistant", "content": "Hi!"}
CLOSE = {"between": " "}
MORE = {"role": "user", "content": "Who are you?"}


class TestGemmaTurns(ChatTemplateContract):
    plugin = headrace_gemma_template
    markers = ("<bos>", "<start_of_turn>", "<end_of_turn>")
    goldens = (
        ([HELLO], "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n"),
        (
            [SYSTEM, HELLO, HI, MORE],
            "<start_of_turn>user\nBe short.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi!<end_of_turn>\n"
            "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n",
        ),
    )

    @pytest.mark.parametrize("messages", [[HI], [HELLO, MORE], [HELLO, SYSTEM], [{"role": "tool", "content": ""}]])
    def test_it_refuses_roles_that_do_not_take_turns(self, messages):
        with pytest.raises(BadRequest, match="take turns"):
            self.build().render(ChatPrompt(messages=tuple(messages)))


class TestBetween(TestGemmaTurns):
    options = CLOSE
    goldens = (([SYSTEM, HELLO], "<start_of_turn>user\nBe short. Hello<end_of_turn>\n<start_of_turn>model\n"),)


class TestOtherModel(TestGemmaTurns):
    __test__ = False
    markers = ("<s>",)


def test_a_model_without_the_markers_is_refused():
    with pytest.raises(ConfigError, match="lacks \\['<start_of_turn>', '<end_of_turn>'\\]"):
        TestOtherModel().build()
