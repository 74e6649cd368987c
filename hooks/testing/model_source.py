"""The contract of the slot `model_source`: a checkpoint that is there, or an error that says where it was sought."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ..errors import ModelError
from ..protocols import Artifact
from .contract import Contract, ensure, skip


class ModelSourceContract(Contract):
    """Resolves references, without the scheme.

    Attributes:
        found: references behind which there is a checkpoint. Override `references` to make one.
        missing: references behind which there is none.
        kinds: what the checkpoints may be, as weight loaders call it.
    """

    slot = "model_source"
    found: ClassVar[Sequence[str]] = ()
    missing: ClassVar[Sequence[str]] = ("no-such-model-anywhere", "", "../..", "a\0b")
    kinds: ClassVar[Sequence[str]] = ("gguf", "safetensors")

    def references(self) -> Sequence[str]:
        """References that must be found."""
        return self.found

    def resolved(self, reference: str) -> Artifact:
        """What is found, with what it reported on the way checked."""
        told: list[tuple[str, int, int]] = []
        artifact = self.build().resolve(reference, lambda what, done, total: told.append((what, done, total)))
        last: dict[str, int] = {}
        for what, done, total in told:
            ensure(0 <= done <= total, f"progress must be told bytes done <= bytes in all, found {done} of {total}")
            ensure(
                done >= last.get(what, 0), f"progress of {what} must not go back, found {done} after {last.get(what)}"
            )
            last[what] = done
        found: Artifact = artifact
        return found

    def test_a_checkpoint_is_found(self) -> None:
        """An `Artifact` of a known kind, whose path exists."""
        self._need_references()
        for reference in self.references():
            found = self.resolved(reference)
            ensure(isinstance(found, Artifact), f"{reference} must become an Artifact, found {found!r}")
            ensure(found.kind in self.kinds, f"its kind must be one of {', '.join(self.kinds)}, found {found.kind!r}")
            ensure(Path(found.path).exists(), f"its path must exist, found {found.path}")
            ensure(found.name, "it must have a name, for /v1/models")

    def test_a_path_holds_what_its_kind_says(self) -> None:
        """A GGUF file; or a folder with `config.json`."""
        self._need_references()
        for reference in self.references():
            found = self.resolved(reference)
            if found.kind == "gguf":
                begins = _first_bytes(found.path)
                ensure(begins == b"GGUF", f"{found.path} must be a GGUF file, it begins with {begins!r}")
            if found.kind == "safetensors":
                ensure((found.path / "config.json").is_file(), f"{found.path} must be a folder with config.json")

    def test_the_same_reference_finds_the_same(self) -> None:
        """And the second time nothing need be brought again."""
        self._need_references()
        for reference in self.references():
            first, second = self.resolved(reference), self.resolved(reference)
            ensure(first == second, f"{reference} must always be the same, found {first} and {second}")

    def test_what_is_missing_is_a_model_error_that_says_so(self) -> None:
        for reference in self.missing:
            try:
                found = self.resolved(reference)
            except ModelError as error:
                ensure(str(error), f"the error on {reference!r} must say where it was sought")
                named = reference.isprintable() and reference in str(error)
                ensure(named or not reference.isprintable(), f"the error must name {reference!r}, found {error}")
                continue
            except Exception as error:
                ensure(False, f"{reference!r} must raise ModelError, found {type(error).__name__}: {error}")
            ensure(False, f"{reference!r} must raise ModelError, found {found}")

    def _need_references(self) -> None:
        if not self.references():
            skip("set found = [references to be found], or override references()")


def _first_bytes(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(4)
