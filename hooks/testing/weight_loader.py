"""The contract of the slot `weight_loader`: what was written is what is read, and broken files are model errors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from ..errors import ModelError
from ..program import Checkpoint
from ..protocols import Artifact
from .contract import Contract, ensure, skip


class WeightLoaderContract(Contract):
    """Opens a small checkpoint; override `write` to make it.

    Attributes:
        architecture: what the checkpoint says of itself.
        tolerance: absolute difference between what was written and what is read.
    """

    slot = "weight_loader"
    architecture: ClassVar[str | None] = None
    tolerance: ClassVar[float] = 0.0

    def write(self, folder: Path) -> tuple[Artifact, Mapping[str, Tensor]]:
        """Write a small checkpoint below *folder*; where it is, and all its tensors."""
        skip("override write(folder) to make a small checkpoint")

    def test_its_table_is_right(self) -> None:
        """Names, shapes and the name of the family, before any weight is read."""
        with TemporaryDirectory() as name:
            artifact, tensors = self.write(Path(name))
            checkpoint = self._open(artifact)
            wanted = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
            found = {key: tuple(shape) for key, shape in checkpoint.shapes.items()}
            ensure(found == wanted, f"shapes must be {wanted}, found {found}")
            ensure(
                isinstance(checkpoint.metadata, Mapping), f"metadata must be a mapping, found {checkpoint.metadata!r}"
            )
            ensure(
                isinstance(checkpoint.generation, Mapping), "generation must be a mapping, empty where there is none"
            )
            family = checkpoint.architecture
            ensure(self.architecture in (None, family), f"architecture must be {self.architecture}, found {family}")
            ensure(checkpoint.artifact == artifact, f"artifact must be {artifact}, found {checkpoint.artifact}")
            checkpoint.close()

    def test_tensors_are_what_was_written(self) -> None:
        with TemporaryDirectory() as name:
            artifact, tensors = self.write(Path(name))
            checkpoint = self._open(artifact)
            for key, wanted in tensors.items():
                found = checkpoint.tensor(key)
                kind = (tuple(found.shape), found.dtype, found.is_contiguous())
                right = (tuple(wanted.shape), torch.float32, True)
                ensure(kind == right, f"{key} must be {right} (shape, dtype, contiguous), found {kind}")
                error = (found - wanted.float()).abs().max().item() if found.numel() else 0.0
                ensure(error <= self.tolerance, f"{key} must be what was written, it is off by {error:.3g}")
            checkpoint.close()

    def test_a_tensor_is_in_memory_of_its_own(self) -> None:
        """Who has it may write to it, close the checkpoint and delete the files."""
        with TemporaryDirectory() as name:
            artifact, tensors = self.write(Path(name))
            checkpoint = self._open(artifact)
            key = next(iter(tensors))
            first = checkpoint.tensor(key)
            before = first.clone()
            first.fill_(7)
            ensure(torch.equal(checkpoint.tensor(key), before), "a tensor must be in memory of its own")
            kept = checkpoint.tensor(key)
            checkpoint.close()
            shutil.rmtree(name)
            ensure(torch.equal(kept, before), "a tensor must stay when the checkpoint is closed and its files are gone")
            Path(name).mkdir()

    def test_what_is_not_there_is_a_model_error(self) -> None:
        with TemporaryDirectory() as name:
            artifact, _ = self.write(Path(name))
            checkpoint = self._open(artifact)
            self._refused(lambda: checkpoint.tensor("no.such.tensor"), "a tensor that is not there")
            checkpoint.close()
            gone = msgspec.structs.replace(artifact, path=Path(name) / "nowhere")
            self._refused(lambda: self._open(gone), "a checkpoint that is not there")

    def test_a_cut_file_is_a_model_error(self) -> None:
        """Wherever it was cut, at once or when a tensor is read."""
        with TemporaryDirectory() as name:
            artifact, tensors = self.write(Path(name))
            file = self._largest(artifact)
            whole = file.read_bytes()
            for part in (0, 3, 8, 40, len(whole) // 2, len(whole) - 1):
                file.write_bytes(whole[:part])
                self._refused(lambda: self._read(artifact, tensors), f"a file cut after {part} of {len(whole)} bytes")

    def test_a_damaged_file_is_a_model_error_or_another_number(self) -> None:
        """Never another exception, and never a crash."""
        with TemporaryDirectory() as name:
            artifact, tensors = self.write(Path(name))
            file = self._largest(artifact)
            whole = file.read_bytes()

            def check(place: int, value: int) -> None:
                damaged = bytearray(whole)
                damaged[place % len(whole)] ^= value
                file.write_bytes(damaged)
                try:
                    self._read(artifact, tensors)
                except ModelError:
                    return
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                    ensure(False, f"a damaged file must raise ModelError, byte {place % len(whole)} raised {found}")

            # Most of a file is weights; what can break is in front.
            places = st.integers(0, 400) | st.integers(0, max(0, len(whole) - 1))
            self.for_all(places, st.integers(1, 255), check=check)

    def _open(self, artifact: Artifact) -> Checkpoint:
        checkpoint: Checkpoint = self.build().open(artifact)
        return checkpoint

    def _read(self, artifact: Artifact, names: Mapping[str, Tensor]) -> None:
        checkpoint = self._open(artifact)
        try:
            for name in names:
                checkpoint.tensor(name)
        finally:
            checkpoint.close()

    def _refused(self, function: object, what: str) -> None:
        assert callable(function)
        try:
            function()
        except ModelError as error:
            ensure(str(error), f"the error on {what} must say what is wrong")
            return
        except Exception as error:
            ensure(False, f"{what} must raise ModelError, found {type(error).__name__}: {error}")
        ensure(False, f"{what} must raise ModelError, and it was read")

    def _largest(self, artifact: Artifact) -> Path:
        """The file with the weights."""
        files = (
            [artifact.path]
            if artifact.path.is_file()
            else [each for each in artifact.path.rglob("*") if each.is_file()]
        )
        return max(files, key=lambda path: path.stat().st_size)
