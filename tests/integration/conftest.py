from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from tests.integration import strangers
from tests.integration.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a Hugging Face folder."""
    return write_tiny(tmp_path_factory.mktemp("integration") / "tiny")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Installs a stranger's plugin until the test ends, and gives its module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, source: str) -> ModuleType:
        strangers.install(tmp_path, name, source)
        return import_module(f"stranger_{name}")

    yield install
    for name in [name for name in sys.modules if name.startswith("stranger_")]:
        del sys.modules[name]


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """What is logged as a warning or worse."""
    config = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING), cache_logger_on_first_use=False
    )
    with capture_logs() as entries:
        yield entries
    structlog.configure(**config)
