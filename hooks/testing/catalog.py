"""Which contract belongs to which slot, and where it lives. Loads nothing until one is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .contract import Contract

MODULES: Final = {
    "model_source": "model_source",
    "architecture": "architecture",
    "weight_loader": "weight_loader",
    "quantizer": "quantizer",
    "attention": "attention",
    "executor": "executor",
    "tokenizer": "tokenizer",
    "chat_template": "chat_template",
    "tool_parser": "parsers",
    "reasoning_parser": "parsers",
    "scheduler_policy": "scheduler_policy",
    "logits_processor": "logits_processor",
    "sampler": "sampler",
    "grammar": "grammar",
    "stop": "stop",
    "admission": "admission",
    "observer": "observer",
    "auth": "auth",
    "middleware": "middleware",
    "routes": "routes",
    "command": "command",
}
"""Slot → the module of this package that has its contract."""


def class_name(slot: str) -> str:
    """How the contract of *slot* is called: `logits_processor` → `LogitsProcessorContract`."""
    return "".join(word.capitalize() for word in slot.split("_")) + "Contract"


NAMES: Final = {class_name(slot): slot for slot in MODULES}
"""Name of a contract → its slot."""


def contract(slot: str) -> type[Contract]:
    """The contract of *slot*, to be subclassed with a plugin.

    Raises:
        KeyError: there is no such slot.
    """
    module = import_module(f"{__package__}.{MODULES[slot]}")
    found: type[Contract] = getattr(module, class_name(slot))
    return found
