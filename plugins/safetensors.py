"""Weight loader `safetensors`: a Hugging Face folder, `config.json` beside one or several `*.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hooks.errors import ModelError
from ..hooks.protocols import Artifact, Context, Register
from ..hooks.registry import plugin

if TYPE_CHECKING:
    from torch import Tensor

headrace_api = 1

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
PACKED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale_inv", ".quant_state.bitsandbytes__nf4", ".absmax")
"""Endings of tensors that only quantized checkpoints have."""


class SafetensorsCheckpoint:
    """An opened folder. Implements `hooks.program.Checkpoint`."""

    def __init__(self, artifact: Artifact) -> None:
        folder = artifact.path
        self.artifact = artifact
        self.metadata: Mapping[str, Any] = _read_object(folder / "config.json")
        self.architecture = _architecture(folder, self.metadata)
        _refuse_quantized(folder, self.metadata)
        has_generation = (folder / "generation_config.json").exists()
        self.generation: Mapping[str, Any] = _read_object(folder / "generation_config.json") if has_generation else {}
        self._files: dict[str, Any] = {}
        self._open_all(folder)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor in float32.

        Raises:
            ModelError: there is none of that name, or it does not hold floating-point numbers.
        """
        import torch

        if name not in self._files:
            raise ModelError(f"{self.artifact.path}: there is no tensor {name}")
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ModelError(f"{self.artifact.path}: {name} must be one of {', '.join(DTYPES)}, found {dtype}")
        tensor: Tensor = self._files[name].get_tensor(name)
        # Read from a mapped file: a copy keeps the weights when the file is closed.
        return tensor.to(torch.float32, copy=True).contiguous()

    def close(self) -> None:
        """Let go of the files."""
        self._files = {}

    def _open_all(self, folder: Path) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        for path, wanted in _shards(folder).items():
            file = _opened(path)
            names = set(file.keys())
            _refuse_packed(path, names)
            if wanted is not None and (missing := sorted(wanted - names)):
                raise ModelError(f"{path}: {INDEX} says that {missing[0]} is here, and it is not")
            for name in names if wanted is None else wanted:
                self._files[name] = file
                shapes[name] = tuple(file.get_slice(name).get_shape())
        self.shapes: Mapping[str, tuple[int, ...]] = shapes


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"{folder / 'config.json'}: architectures must be a list of one name, found {names!r}")
    return names[0]


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    """Weights in a format of their own must never be taken for plain ones.

    Raises:
        ModelError: one of the configs names such a format.
    """
    nested = [config, *(part for part in config.values() if isinstance(part, dict))]
    for key in ("quantization_config", "compression_config"):
        for part in nested:
            if found := part.get(key):
                method = found.get("quant_method") if isinstance(found, dict) else None
                raise ModelError(f"{folder / 'config.json'}: {_quantized(method or f'an unnamed format ({key})')}")
    for name, method in (("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")):
        if (folder / name).is_file():
            raise ModelError(f"{folder / name}: {_quantized(method)}")


def _refuse_packed(path: Path, names: set[str]) -> None:
    packed = sorted(name for name in names if name.endswith(PACKED))
    if packed:
        raise ModelError(f"{path}: {packed[0]}: {_quantized('gptq, awq or the like')}")


def _quantized(method: object) -> str:
    return (
        f"the weights are quantized as {method!s:.100}, which is not read from safetensors; use the model's folder "
        "in bf16, f16 or f32 (and a quantizer here), or a quantized GGUF file of it"
    )


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """File → the tensors that the index expects in it, or None: all that are there."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    if not (folder / INDEX).is_file():
        raise ModelError(f"{folder}: there must be {SINGLE} or {INDEX}, and there is neither")
    files = _read_object(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{folder / INDEX}: weight_map must be an object with tensors, found {type(files).__name__}")
    shards: dict[Path, set[str] | None] = {}
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{folder / INDEX}: {name} must lie in a file of this folder, found {file!r}")
        wanted = shards.setdefault(folder / file, set())
        assert wanted is not None
        wanted.add(name)
    return shards


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ModelError(f"{path}: {INDEX} names this file, and it is missing; download it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors, it is cut or corrupt: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


class SafetensorsLoader:
    """Opens Hugging Face folders."""

    def open(self, artifact: Artifact) -> SafetensorsCheckpoint:
        """Read the configs and the tables of tensors.

        Raises:
            ModelError: a file is missing, cut or corrupt.
        """
        return SafetensorsCheckpoint(artifact)


def _build(context: Context, options: None) -> SafetensorsLoader:
    return SafetensorsLoader()


@plugin
def register_weight_loader(register: Register) -> None:
    """Offer `safetensors`."""
    register("safetensors", _build, doc="Hugging Face folders with safetensors.")
