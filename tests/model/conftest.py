from pathlib import Path

import pytest

from headrace.core.kernels.reference import ReferenceModel
from tests.model.tiny import open_model, transformers_model, write_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a GGUF file."""
    return write_gguf(transformers_model(), tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same Llama as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    transformers_model().save_pretrained(folder)
    return folder


@pytest.fixture
def model(tiny_gguf: Path) -> ReferenceModel:
    """The tiny Llama with a KV cache of its own, full of NaN."""
    return open_model(tiny_gguf)
