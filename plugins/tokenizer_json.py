"""A tokenizer from a Hugging Face folder: `tokenizer.json`, and what the small files beside it say.

A library of the `tokenizer` plugin, and of whatever else reads such a folder.
"""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from ..hooks.errors import ModelError


def _byte_letters() -> dict[int, int]:
    """The letter that stands for each byte in a byte-level vocabulary, to be undone with `str.translate`.

    Source: Radford et al. 2019, GPT-2: printable Latin-1 stands for itself, the rest is moved to U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    # What is no such letter must not pass for a byte: it is sent where Latin-1 cannot follow.
    letters = dict.fromkeys(others, 0xFFFD)
    return letters | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTE_LETTERS: Final = _byte_letters()
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


class Spelling(NamedTuple):
    """How a vocabulary writes down bytes.

    Attributes:
        byte_level: each letter is a byte.
        byte_tokens: `<0xE7>` is a byte.
        replacements: what else is written differently, such as a space as `▁`.
        leading_spaces: spaces the tokenizer puts before a text, and its decoder takes away again.
    """

    byte_level: bool = False
    byte_tokens: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0

    def read(self, entry: str) -> bytes:
        """The bytes that *entry* stands for."""
        if self.byte_level:
            try:
                return entry.translate(_BYTE_LETTERS).encode("latin-1")
            except UnicodeEncodeError:
                return entry.encode()
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(entry)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            entry = entry.replace(old, new)
        return entry.encode()


def load(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in *path*, a `tokenizer.json`, without limits on length.

    Raises:
        ModelError: there is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise ModelError(
            f"a model's folder must hold tokenizer.json, found none in {path.parent}; save one there with "
            "transformers' fast tokenizer, or use a GGUF file"
        )
    try:
        engine = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing narrower.
        raise ModelError(f"{path}: not a tokenizer that can be read: {error}") from error
    # A file may carry the limits of its training.
    engine.no_truncation()
    engine.no_padding()
    return engine


def named_specials(folder: Path) -> dict[str, str]:
    """`bos_token` and the like → text; `tokenizer_config.json` has the last word."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, token in read_json(folder / name).items():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str):
                named[key] = text
    return named


def read_json(path: Path) -> dict[str, Any]:
    """The object in *path*; empty if there is no such file."""
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: must hold a JSON object, found {type(found).__name__}")
    return found


def prefix(engine: tokenizers.Tokenizer) -> list[int]:
    """What the file's post-processor puts before a text."""
    encoded = engine.encode("a")
    return [id for id, _ in takewhile(lambda pair: pair[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))]


def pieces(engine: tokenizers.Tokenizer, spelling: Spelling) -> list[bytes]:
    """The bytes each id stands for; none for a gap in the ids."""
    vocab = engine.get_vocab(with_added_tokens=True)
    found = [b""] * (max(vocab.values(), default=-1) + 1)
    for entry, id in vocab.items():
        found[id] = spelling.read(entry)
    for id, token in engine.get_added_tokens_decoder().items():
        found[id] = token.content.encode()
    return found


def spelling(engine: tokenizers.Tokenizer, path: Path) -> Spelling:
    """Read the `decoder` of *path*."""
    decoder = json.loads(engine.decoder.__getstate__()) if engine.decoder is not None else {}
    found = Spelling()
    for step in decoder.get("decoders", [decoder]):
        match step:
            case {"type": "ByteLevel"}:
                found = found._replace(byte_level=True)
            case {"type": "ByteFallback"}:
                found = found._replace(byte_tokens=True)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                found = found._replace(replacements=(*found.replacements, (old, new)))
            case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}:
                spaces = 0 if scheme == "never" else 1
                found = found._replace(replacements=(*found.replacements, (old, " ")), leading_spaces=spaces)
            case {"type": "Strip", "content": " ", "start": int(spaces), "stop": 0}:
                found = found._replace(leading_spaces=spaces)
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelError(
                    f"{path}: the decoder must be made of ByteLevel, ByteFallback, Replace, Metaspace, Fuse and Strip "
                    f"(of leading spaces), found {step or 'none'}"
                )
    return found
