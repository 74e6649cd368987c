"""Executor `thread`: Headrace's own model, on one thread that runs a step after the other."""

from __future__ import annotations

from ..hooks.protocols import Context, Executor, Register
from ..hooks.registry import plugin

headrace_api = 1


def build(context: Context, options: None) -> Executor:
    """Read the weights and put the model on its thread."""
    offered = context.executor
    assert offered is not None
    return offered.on_thread(offered.load())


build.uses_model = True  # type: ignore[attr-defined]


@plugin
def register_executor(register: Register) -> None:
    """Offer `thread`."""
    register("thread", build, doc="Headrace's own model, on a thread of its own.")
