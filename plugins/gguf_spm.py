"""The SentencePiece BPE tokenizer that a GGUF file holds as lists of pieces, scores and types (`llama`).

A library of the `tokenizer` plugin. Of two neighbours the pair whose piece has the highest score is joined first, the
leftmost of equals; a character that is no piece becomes its bytes. That is BPE with merges in the order of scores, so
the `tokenizers` library runs it. What SentencePiece does to a sentence before (a space in front, spaces as `▁`) it does
to the whole, user-defined pieces included, which the library does not; it is done here.

Source: google/sentencepiece, src/bpe_model.cc and src/normalizer.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import models

from ..hooks.errors import ModelError
from .gguf_lists import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Lists, add_tokens, entries, flag, read_lists
from .tokenizer_json import Spelling

SPACE: Final = "▁"
_SPACES: Final = re.compile(" {2,}")


class Sentence(NamedTuple):
    """What is done to a text without control tokens before it is cut into pieces.

    Attributes:
        prefix: a space goes in front.
        tidy: spaces at the ends go, and runs of them become one.
    """

    prefix: bool
    tidy: bool

    def spell(self, text: str) -> str:
        """*text* as the pieces spell it."""
        if self.tidy:
            text = _SPACES.sub(" ", text.lstrip(" ")).rstrip(f" {SPACE}")
        if self.prefix and text:
            text = " " + text
        return text.replace(" ", SPACE)

    @property
    def leading_spaces(self) -> int:
        """Spaces that a decoder takes from the start of a text. Where they are tidied, it takes all."""
        return 1 << 30 if self.tidy else int(self.prefix)


class SentencePiece(NamedTuple):
    """The lists of a SentencePiece tokenizer."""

    lists: Lists
    scores: list[float]
    sentence: Sentence


def read(metadata: Mapping[str, Any]) -> SentencePiece:
    """Pick the lists out of *metadata*.

    Raises:
        ModelError: a list is missing or not what it must be.
    """
    lists = read_lists(metadata)
    scores = entries(metadata, "scores", float)
    if len(scores) != len(lists.tokens):
        raise ModelError(
            f"tokenizer.ggml.scores must have {len(lists.tokens)} entries, one a token; found {len(scores)}"
        )
    prefix, tidy = flag(metadata, "add_space_prefix", True), flag(metadata, "remove_extra_whitespaces", False)
    return SentencePiece(lists, scores, Sentence(prefix, tidy))


def build(found: SentencePiece) -> tokenizers.Tokenizer:
    """A tokenizer that parses control tokens, for texts that went through `Sentence`.

    Raises:
        ModelError: the library refuses the lists.
    """
    lists = found.lists
    # Converters write the spaces of user-defined pieces as spaces.
    spelled = [
        token.replace(" ", SPACE) if type == USER_DEFINED else token
        for type, token in zip(lists.types, lists.tokens, strict=True)
    ]
    vocab = {token: id for id, token in enumerate(spelled)}
    normal = {
        token: score for token, score, type in zip(spelled, found.scores, lists.types, strict=True) if type == NORMAL
    }
    letters = _unlisted_letters(normal, vocab)
    merges = [pair for _, pair in sorted(_merges(normal, normal.keys() | letters.keys()))]
    unknown = next((token for token, type in zip(spelled, lists.types, strict=True) if type == UNKNOWN), None)
    try:
        model = models.BPE(
            vocab=letters | vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in lists.types
        )
    except Exception as error:  # The library raises nothing narrower.
        raise ModelError(f"tokenizer.ggml.tokens make no SentencePiece tokenizer: {error}") from error
    engine = tokenizers.Tokenizer(model)
    add_tokens(engine, lists, spelled)
    return engine


def pieces(lists: Lists) -> list[bytes]:
    """The bytes each token stands for."""
    as_text, as_byte, with_spaces = Spelling(), Spelling(byte_tokens=True), Spelling(replacements=((SPACE, " "),))
    spellings = {UNKNOWN: as_text, CONTROL: as_text, BYTE: as_byte}
    typed = zip(lists.types, lists.tokens, strict=True)
    return [spellings.get(type, with_spaces).read(token) for type, token in typed]


def _merges(normal: Mapping[str, float], parts: set[str]) -> Iterator[tuple[tuple[float, int, int], tuple[str, str]]]:
    """(order, pair) for each way to make a piece out of two *parts*; a score that is no number comes last.

    Where `aba` can be made of `ab` `a` and of `a` `ba` and both stand in `ab` `a` `ba`, the leftmost must win, which
    is the one with the longer left part.
    """
    for id, (token, score) in enumerate(normal.items()):
        order = -score if score == score else float("inf")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                yield (order, id, -cut), (left, right)


def _unlisted_letters(normal: Mapping[str, float], vocab: Mapping[str, int]) -> dict[str, int]:
    """ASCII characters that are no pieces, but of which pieces are made (Gemma's tab); their bytes stand for them."""
    used = {letter for token in normal for letter in token if letter.isascii() and letter not in vocab}
    bytes_of = {letter: vocab.get(f"<0x{ord(letter):02X}>") for letter in used}
    return {letter: id for letter, id in bytes_of.items() if id is not None}
