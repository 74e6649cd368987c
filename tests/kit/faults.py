"""Runs a contract on components made for it, good ones and ones with a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest

import headrace
from headrace.hooks.testing.catalog import contract
from headrace.hooks.testing.contract import Contract, run


def plugin_of(slot: str, factory: Callable[..., object], *, called: str = "it", **registered: Any) -> SimpleNamespace:
    """A plugin in this process that offers one component."""

    def hook(register: Any) -> None:
        register(called, factory, **registered)

    hook.__name__ = f"register_{slot}"
    return SimpleNamespace(**{hook.__name__: headrace.plugin(hook)})


def contract_of(slot: str, component: Any, *, struct: Any = None, **attributes: Any) -> Any:
    """The contract of *slot* for a class without arguments; *struct*: of its parameters."""
    plugin = plugin_of(slot, lambda context, options: component(), params=struct)
    return type("TestIt", (contract(slot),), {"plugin": plugin, "name": "it", "shrinks": False, **attributes})


def failures(tried: type[Contract], tests: list[str] | None = None) -> dict[str, Exception]:
    """What fails, and how."""
    results = run(tried, tests)
    return {name: error for name, error in results.items() if error is not None and not isinstance(error, SkipTest)}


def skipped(tried: type[Contract]) -> list[str]:
    """What is left untried."""
    return [name for name, error in run(tried).items() if isinstance(error, SkipTest)]
