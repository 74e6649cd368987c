"""Chat template `gemma-turns`: each message between `<start_of_turn>role` and `<end_of_turn>`, as Gemma 1 to 3 have it.

The model has two roles, user and model. What the system says goes in front of the user's first words. For a checkpoint
that comes without its template, or to change what the template does with the system message.
"""

from __future__ import annotations

from msgspec import Struct

import headrace
from headrace.hooks.errors import ConfigError
from headrace.plugins.jinja_template import JinjaTemplate

headrace_api = 1

MARKERS = ("<start_of_turn>", "<end_of_turn>")
SOURCE = """\
{{- bos_token | default('') }}
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if messages[0]['role'] == 'system' else messages) %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('after the system message, user and assistant must take turns') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}
    {{- system + between if loop.first and system }}
    {{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    between: str = "\n\n"
    """What stands between the system message and the user's first words."""


def build(context, options):
    """The template. What users type never becomes a marker, for the tokenizer says which texts are control tokens."""
    specials = context.tokenizer.specials
    missing = [marker for marker in MARKERS if marker not in specials]
    if missing:
        raise ConfigError(f"gemma-turns needs a model with the control tokens {', '.join(MARKERS)}; it lacks {missing}")
    names = {**context.tokenizer.named_specials, "between": options.between}
    return JinjaTemplate({"default": SOURCE}, names=names, control_tokens=specials)


@headrace.plugin
def register_chat_template(register):
    register("gemma-turns", build, config=Options, doc="<start_of_turn> and <end_of_turn>, as Gemma has them.")
