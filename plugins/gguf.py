"""Weight loader `gguf`: a mapped file, whose tensors are dequantized by the `gguf` package as they are asked for."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.model.gguf import read_header
from ..hooks.errors import ModelError
from ..hooks.protocols import Artifact, Context, Register
from ..hooks.registry import plugin

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.kernels.quantized import Blocks

headrace_api = 1


class GGUFCheckpoint:
    """An opened GGUF file. Implements `hooks.program.Checkpoint`."""

    generation: Mapping[str, Any] = {}

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._data = _mapped(artifact.path)
        try:
            self.metadata, self._tensors = read_header(artifact.path, self._data)
            architecture = self.metadata.get("general.architecture")
            if not isinstance(architecture, str):
                raise ModelError(f"{artifact.path}: general.architecture must name the family, found {architecture!r}")
        except BaseException:
            self.close()
            raise
        self.architecture: str = architecture
        self.shapes: Mapping[str, tuple[int, ...]] = {name: info.shape for name, info in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, dequantized to float32.

        Raises:
            ModelError: there is none of that name, or its type cannot be dequantized.
        """
        import numpy
        import torch
        from gguf import GGMLQuantizationType, dequantize

        info = self._tensors.get(name)
        if info is None:
            raise ModelError(f"{self.artifact.path}: there is no tensor {name}")
        raw = numpy.frombuffer(self._data, numpy.uint8, info.size, info.start)
        # The package works through 16 rows at a time; rows count for nothing in it, and longer ones take half the time.
        num_rows = math.prod(info.shape[:-1])
        kind = GGMLQuantizationType(info.type)
        if kind == GGMLQuantizationType.F64:  # The one type of floats that the package does not convert.
            return torch.from_numpy(raw.view(numpy.float64).astype(numpy.float32)).reshape(info.shape)
        try:
            values = dequantize(raw.reshape(num_rows // math.gcd(num_rows, 16), -1), kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.artifact.path}: {name} is of type {kind.name}, which cannot be read as weights"
            ) from error
        # What is not dequantized is still a view of the file.
        owned = values.copy() if kind == GGMLQuantizationType.F32 else values
        return torch.from_numpy(owned).reshape(info.shape)

    def blocks(self, name: str) -> Blocks:
        """The tensor as it lies in the file, `[…, rows, bytes]`, in memory of its own."""
        import numpy
        import torch
        from gguf import GGMLQuantizationType

        from ..core.kernels.quantized import Blocks

        info = self._tensors[name]
        raw = numpy.frombuffer(self._data, numpy.uint8, info.size, info.start).copy()
        kind = GGMLQuantizationType(info.type).name
        return Blocks(kind=kind, raw=torch.from_numpy(raw).reshape(*info.shape[:-1], -1))

    def kind(self, name: str) -> str:
        """ggml's name of a tensor's type."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self._tensors[name].type).name

    def close(self) -> None:
        """Unmap the file."""
        # While an error is on its way, its traceback may hold a view of the file, which is then unmapped with it.
        with suppress(BufferError):
            self._data.close()


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty.
        raise ModelError(f"{path}: cannot be read as GGUF: {error}") from error


class GGUFLoader:
    """Opens GGUF files."""

    def open(self, artifact: Artifact) -> GGUFCheckpoint:
        """Read metadata and the table of tensors.

        Raises:
            ModelError: cut, corrupt, or of another version; says at which byte, what was expected and what was found.
        """
        return GGUFCheckpoint(artifact)


def _build(context: Context, options: None) -> GGUFLoader:
    return GGUFLoader()


@plugin
def register_weight_loader(register: Register) -> None:
    """Offer `gguf`."""
    register("gguf", _build, doc="GGUF files, versions 2 and 3.")
