"""Chat template `chatml`: each message between `<|im_start|>role` and `<|im_end|>`.

For a model that was trained on this format and comes without a template, or with a wrong one. What a user types never
becomes a marker. Tools are not rendered.

Source: OpenAI, ChatML (chatml.md of the openai-python repository, 2023), as Qwen and many others use it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin
from .jinja_template import JinjaTemplate
from .markers import with_markers

headrace_api = 1

MARKERS: Final = ("<|im_start|>", "<|im_end|>")
SOURCE: Final = """\
{%- if system and messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    system: str = ""
    """System message of conversations that begin with another one. Empty: none."""


def build(context: Context, options: Options) -> JinjaTemplate:
    """Raises:
    ConfigError: the model does not have the markers.
    """
    return with_markers("chatml", SOURCE, MARKERS, context, system=options.system)


@plugin
def register_chat_template(register: Register) -> None:
    register("chatml", build, config=Options, doc="<|im_start|> and <|im_end|>, as many models use them.")
