"""The pytest plugin `headrace`: an option to try harder, and assertions that say what they saw.

It is loaded into every pytest run of an environment with Headrace, so it imports nothing but pytest's own; what it
does for the contracts it does only once one of them is collected.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--headrace-examples`: how many random cases each promise of a contract is tried on."""
    group = parser.getgroup("headrace")
    group.addoption(
        "--headrace-examples",
        type=int,
        metavar="N",
        help="random cases that each promise of a Headrace contract is tried on (default: what the contract says)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hand the option to the contracts that were collected."""
    number = config.getoption("--headrace-examples")
    kit = sys.modules.get(f"{__package__}.contract")
    if number is None or kit is None:
        return
    for cls in {getattr(item, "cls", None) for item in items}:
        if isinstance(cls, type) and issubclass(cls, kit.Contract):
            cls.examples = number  # type: ignore[attr-defined]
