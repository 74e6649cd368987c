"""The byte-level BPE tokenizer that a GGUF file holds as lists of tokens, merges and types (`gpt2`).

A library of the `tokenizer` plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from ..hooks.errors import ModelError
from .gguf_lists import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Lists, add_tokens, entries, read_lists
from .gguf_splitters import Splitter, splitter
from .tokenizer_json import Spelling


class ByteLevel(NamedTuple):
    """The lists of a byte-level tokenizer."""

    lists: Lists
    merges: list[tuple[str, str]]
    splitter: Splitter


def read(metadata: Mapping[str, Any]) -> ByteLevel:
    """Pick the lists out of *metadata*.

    Raises:
        ModelError: a list is missing or not what it must be, or the splitter is unknown.
    """
    lists = read_lists(metadata)
    merges = [_pair(merge) for merge in entries(metadata, "merges", str)]
    return ByteLevel(lists, merges, splitter(metadata.get("tokenizer.ggml.pre")))


def build(found: ByteLevel) -> tokenizers.Tokenizer:
    """A tokenizer that parses control tokens, and adds none of its own accord.

    Raises:
        ModelError: a merge makes a token that the list of tokens has not.
    """
    lists, split = found.lists, found.splitter
    vocab = {token: id for id, token in enumerate(lists.tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=found.merges, ignore_merges=split.ignore_merges)
    except Exception as error:  # The library raises nothing narrower.
        raise ModelError(f"tokenizer.ggml.merges must fit tokenizer.ggml.tokens: {error}") from error
    engine = tokenizers.Tokenizer(model)
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [*map(_isolated, split.patterns), to_letters, *map(_isolated, split.letter_patterns)]
    )
    if split.nfc:
        engine.normalizer = normalizers.NFC()
    add_tokens(engine, lists, lists.tokens)
    return engine


def pieces(lists: Lists) -> list[bytes]:
    """The bytes each token stands for."""
    as_text, as_byte, letters = Spelling(), Spelling(byte_tokens=True), Spelling(byte_level=True)
    spellings = {**dict.fromkeys((UNKNOWN, CONTROL, USER_DEFINED), as_text), BYTE: as_byte}
    typed = zip(lists.types, lists.tokens, strict=True)
    return [spellings.get(type, letters).read(token) for type, token in typed]


def _isolated(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
