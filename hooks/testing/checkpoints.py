"""A checkpoint that exists in memory alone: a config, a table of shapes, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ..errors import ModelError
from ..protocols import Artifact

if TYPE_CHECKING:
    from torch import Tensor


class FakeCheckpoint:
    """Implements `hooks.program.Checkpoint`; notes which tensors were read.

    Args:
        architecture: as the checkpoint calls it.
        metadata: what `config.json` says, or the keys of a GGUF file.
        shapes: tensor name → shape, outermost dimension first.
        kind: `safetensors` or `gguf`.
    """

    def __init__(
        self,
        *,
        architecture: str,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        kind: str = "safetensors",
    ) -> None:
        self.artifact = Artifact(kind=kind, path=Path("fake"), name="fake")
        self.architecture = architecture
        self.metadata = metadata
        self.shapes = shapes
        self.generation: Mapping[str, Any] = {}
        self.read: list[str] = []

    def tensor(self, name: str) -> Tensor:
        """Random numbers that depend on the name alone; norms lie around 1."""
        import torch

        if name not in self.shapes:
            raise ModelError(f"there is no tensor {name}")
        self.read.append(name)
        shape = self.shapes[name]
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) * 0.2
        return tensor + 1 if len(shape) == 1 and "bias" not in name else tensor

    def close(self) -> None:
        """Nothing to let go of."""
