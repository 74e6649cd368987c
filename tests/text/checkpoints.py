"""Checkpoints made of nothing but words: a tokenizer and a chat template, no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from headrace.hooks.errors import ModelError
from headrace.hooks.protocols import Artifact, Context
from headrace.plugins.tokenizer import ModelTokenizer, tokenizer


class WordsOnly:
    """A checkpoint without tensors."""

    architecture = "llama"

    def __init__(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        kind = "gguf" if folder is None else "safetensors"
        self.artifact = Artifact(kind=kind, path=folder or Path("model.gguf"), name="model")
        self.metadata = metadata or {}
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        self.generation = generation or {}

    def tensor(self, name: str) -> Tensor:
        raise ModelError(f"no tensor {name}")

    def close(self) -> None:
        pass


def build(checkpoint: WordsOnly) -> ModelTokenizer:
    return tokenizer(Context(checkpoint=checkpoint), None)


def sentencepiece(folder: Path, **config: Any) -> WordsOnly:
    """A folder as Llama 2 has it: spaces as `▁`, one more before the text, bytes as `<0xE7>`, BOS in front."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "北",
        "a",
        "b",
        "c",
        "▁a",
        "▁北",
    ]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "北")]
    engine = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replace = decoders.Replace("▁", " ")
    engine.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    engine.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return folder_of(engine, folder, **{"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config})


def folder_of(engine: Tokenizer, folder: Path, **config: Any) -> WordsOnly:
    """A checkpoint whose folder holds *engine* and a `tokenizer_config.json`."""
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return WordsOnly(folder=folder)
