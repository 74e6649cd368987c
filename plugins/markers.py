"""Chat templates that are written here and not by the model: their markers must be control tokens of the model."""

from __future__ import annotations

from collections.abc import Sequence

from ..hooks.errors import ConfigError
from ..hooks.protocols import Context
from .jinja_template import JinjaTemplate


def with_markers(name: str, source: str, markers: Sequence[str], context: Context, **names: str) -> JinjaTemplate:
    """The template *source*, for a model that has all its *markers*.

    Args:
        name: of the template, for errors.
        names: further names for the template.

    Raises:
        ConfigError: a marker is plain text for the model's tokenizer, so that users could forge turns.
    """
    # A stranger's tokenizer need not tell its control tokens; then there is nothing to compare with.
    specials = getattr(context.tokenizer, "specials", {})
    missing = [marker for marker in markers if marker not in specials]
    if missing:
        raise ConfigError(
            f"the chat template {name} needs a model with the control tokens {', '.join(markers)}; this one's "
            f"tokenizer lacks {', '.join(missing)}; use jinja for the model's own template, or plain"
        )
    named = getattr(context.tokenizer, "named_specials", {})
    return JinjaTemplate({"default": source}, names={**named, **names}, control_tokens=specials)
