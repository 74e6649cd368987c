"""Model source `hf:`: a checkpoint on a Hugging Face hub, brought into the cache that all of its tools share.

`hf:ORG/NAME` is a folder with safetensors, `hf:ORG/NAME/FILE.gguf` one file; `@REVISION` (a branch, tag or commit) may
follow either. Where the hub cannot be reached, what the cache holds is used. The hub's own variables count: `HF_TOKEN`,
`HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import glob
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from ..hooks.errors import ModelError
from ..hooks.protocols import Artifact, Context, Register
from ..hooks.registry import plugin

headrace_api = 1

Progress = Callable[[str, int, int], None]

FOLDER_FILES: Final = ["*.json", "*.jinja", "*.safetensors"]
NOT_FOLDER_FILES: Final = ["*/*", "consolidated*"]
"""Left out: other formats in subfolders, and a second copy of the weights under other names."""


class Reference(NamedTuple):
    """What stands after `hf:`, in its parts. *file* is empty for a folder, *revision* for the main branch."""

    repository: str
    file: str
    revision: str

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises:
        ModelError: not ORG/NAME[/FILE.gguf][@REVISION].
        """
        path, at, revision = text.partition("@")
        parts = path.split("/")
        file = "/".join(parts[2:])
        if len(parts) < 2 or not all(parts) or ".." in parts or (at and not revision):
            raise ModelError(f"hf:{text}: must be hf:ORG/NAME, hf:ORG/NAME/FILE.gguf, or either with @REVISION")
        if file and not file.endswith(".gguf"):
            raise ModelError(f"hf:{text}: a file must be a *.gguf, found {file}; for safetensors name no file")
        return cls("/".join(parts[:2]), file, revision)

    def __str__(self) -> str:
        return (
            "hf:" + "/".join(filter(None, (self.repository, self.file))) + (f"@{self.revision}" * bool(self.revision))
        )


class HubSource:
    """Brings checkpoints from a hub.

    Args:
        endpoint: URL of the hub; None for `HF_ENDPOINT` or the public one.
        cache: folder of the cache; None for the usual one.
    """

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        self._endpoint = endpoint
        self._cache = cache

    def resolve(self, reference: str, progress: Progress) -> Artifact:
        """Download what the cache lacks.

        Raises:
            ModelError: no such model, revision or file, no permission, no connection, or a download that broke off.
        """
        wanted = Reference.parse(reference)
        folder = self._snapshot(wanted, progress)
        if wanted.file:
            path = folder / wanted.file
            if not path.is_file():
                raise ModelError(f"{wanted}: there is no file {wanted.file} in {wanted.repository}; look for its name")
            return Artifact(kind="gguf", path=path, name=PurePosixPath(wanted.file).stem)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{wanted}: there is no config.json in {wanted.repository}; if it holds GGUF files, choose one with "
                f"hf:{wanted.repository}/FILE.gguf"
            )
        return Artifact(kind="safetensors", path=folder, name=wanted.repository.partition("/")[2])

    def _snapshot(self, wanted: Reference, progress: Progress) -> Path:
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                wanted.repository,
                revision=wanted.revision or None,
                cache_dir=self._cache,
                endpoint=self._endpoint,
                allow_patterns=[glob.escape(wanted.file)] if wanted.file else FOLDER_FILES,
                ignore_patterns=None if wanted.file else NOT_FOLDER_FILES,
                tqdm_class=_bar(str(wanted), progress),
                library_name="headrace",
            )
        except Exception as error:  # The library lets through what the layers below it raise.
            raise _explained(wanted, error) from error
        return Path(folder)


def _explained(wanted: Reference, error: Exception) -> ModelError:
    """What went wrong, and what to do."""
    from huggingface_hub import errors

    match error:
        case errors.HFValidationError():
            reason = f"not a name the hub could have: {_first_line(error)}"
        case errors.GatedRepoError():
            reason = (
                f"access to {wanted.repository} must be granted first; ask for it on the model's page, then set "
                "HF_TOKEN to a token of the same account"
            )
        case errors.RepositoryNotFoundError():
            reason = (
                f"the hub knows no model {wanted.repository}, or shows it to its members only; check the spelling, or "
                "set HF_TOKEN to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            reason = f"{wanted.repository} has no revision {wanted.revision}; name a branch, tag or commit that it has"
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError():
            reason = _unreachable(wanted, error)
        case _:
            reason = (
                f"the download broke off: {type(error).__name__}: {_first_line(error)}; start again to go on where it "
                "stopped"
            )
    return ModelError(f"{wanted}: {reason}")


def _unreachable(wanted: Reference, error: Exception) -> str:
    from huggingface_hub import constants

    cached = f"all files of {wanted.repository} must be in the cache, and they are not"
    advice = "or download it elsewhere and give its path"
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, so {cached}; start once without it, {advice}"
    cause = error.__cause__ or error
    return (
        f"the hub cannot be reached ({type(cause).__name__}: {_first_line(cause)}), so {cached}; check the connection "
        f"and HF_ENDPOINT, {advice}"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def _bar(what: str, progress: Progress) -> type[Any]:
    """A bar that draws nothing and tells *progress*.

    The library makes several: for bytes received, bytes written and files, moved by several threads.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    done: dict[int, tuple[int, int]] = {}

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            self.num_bytes = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total") or 0

        def update(self, n: float | None = 1) -> bool | None:
            if self.counts_bytes:
                with lock:
                    self.num_bytes += int(n or 0)
                    done[id(self)] = (self.num_bytes, int(self.total or 0))
                    progress(what, *max(done.values()))
            return None

    return Bar


def _build(context: Context, options: None) -> HubSource:
    return HubSource()


@plugin
def register_model_source(register: Register) -> None:
    """Offer `hf`."""
    register("hf", _build, doc="hf:ORG/NAME or hf:ORG/NAME/FILE.gguf, with @REVISION or without: a Hugging Face hub.")
