"""Chat template `llama3`: each message after a header with its role, and `<|eot_id|>` at its end.

For a model that was trained on this format and comes without a template, or with a wrong one. What a user types never
becomes a marker. Contents are trimmed, as the format asks for. Tools are not rendered.

Source: Meta, Llama 3 model card, prompt format, 2024.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin
from .jinja_template import JinjaTemplate
from .markers import with_markers

headrace_api = 1

MARKERS: Final = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SOURCE: Final = """\
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{{- '<|begin_of_text|>' }}
{%- if system and messages[0]['role'] != 'system' %}
    {{- header('system') + system | trim + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- header(message['role']) + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    system: str = ""
    """System message of conversations that begin with another one. Empty: none."""


def build(context: Context, options: Options) -> JinjaTemplate:
    """Raises:
    ConfigError: the model does not have the markers.
    """
    return with_markers("llama3", SOURCE, MARKERS, context, system=options.system)


@plugin
def register_chat_template(register: Register) -> None:
    register("llama3", build, config=Options, doc="Headers and <|eot_id|>, as Llama 3 uses them.")
