"""Chat template `plain`: `User: …`, `Assistant: …`, for models that know no chat format at all.

No marker is used but the model's own beginning of text, so nothing tells a user who writes `Assistant:` on a new line
from the assistant: do not build on the roles. Give requests `User:` as a stop string.
"""

from __future__ import annotations

from typing import Final

from ..hooks.protocols import Context, Register
from ..hooks.registry import plugin
from .jinja_template import JinjaTemplate
from .markers import with_markers

headrace_api = 1

SOURCE: Final = """\
{{- bos_token | default('') }}
{%- for message in messages %}
    {{- message['role'] | capitalize + ': ' + message['content'] | trim + '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
"""


def build(context: Context, options: None) -> JinjaTemplate:
    return with_markers("plain", SOURCE, (), context)


@plugin
def register_chat_template(register: Register) -> None:
    register("plain", build, doc="User: and Assistant:, for models without a chat format.")
