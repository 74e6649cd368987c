"""The byte-level BPE tokenizer that a GGUF file holds as lists of tokens, merges and types.

A library of the `tokenizer` plugin. GGUF names the way text is split before merging (`tokenizer.ggml.pre`) without
describing it; the table of those names is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import structlog
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from ..hooks.errors import ModelError
from .tokenizer_json import Spelling

log = structlog.get_logger()


class Splitter(NamedTuple):
    """What a GGUF file leaves unsaid and means by `tokenizer.ggml.pre`.

    Attributes:
        patterns: applied one after the other; each match, and what lies between matches, becomes a piece.
        nfc: text is composed first.
        ignore_merges: a piece that is a token as a whole stays whole.
        add_bos: whether BOS goes in front where `add_bos_token` is missing.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_WITH_MARKS: Final = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS_WITHOUT_MARKS: Final = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"

_ONE_DIGIT: Final = Splitter((r"\p{N}", _GPT2))
_LLAMA3: Final = Splitter(
    ("|".join((_SUFFIXES, _WORDS, r"\p{N}{1,3}", _SIGNS, _SPACES)),), ignore_merges=True, add_bos=True
)

SPLITTERS: Final[Mapping[str, Splitter]] = {
    "gpt2": Splitter((_GPT2,)),
    "gpt-2": Splitter((_GPT2,)),
    "smollm": _ONE_DIGIT,
    "starcoder": _ONE_DIGIT,
    "refact": _ONE_DIGIT,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": Splitter(("|".join((_SUFFIXES, _WORDS, r"\p{N}", _SIGNS, _SPACES)),), nfc=True),
    "qwen35": Splitter(("|".join((_SUFFIXES, _WORDS_WITH_MARKS, r"\p{N}", _SIGNS_WITHOUT_MARKS, _SPACES)),), nfc=True),
    "default": Splitter((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""Sources: each model's published `tokenizer.json`; for `default`, llama.cpp's table of pre-tokenizers."""

# Types of tokens, in GGUF's numbers: unknown and control; user defined; byte.
_CONTROL: Final = (2, 3)
_USER_DEFINED: Final = 4
_BYTE: Final = 6

_NAMES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # As the format spells it.
    "pad_token": "padding",
    "mask_token": "mask",
}
_END_KEYS: Final = ("eos", "eot", "eom")


class Lists(NamedTuple):
    """The tokenizer's part of a GGUF file's metadata."""

    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    splitter: Splitter
    bos: int | None
    add_bos: bool
    named_specials: dict[str, str]
    end_ids: frozenset[int]


def read(metadata: Mapping[str, Any]) -> Lists:
    """Pick the lists out of *metadata* and check that they belong together.

    Raises:
        ModelError: it is another kind of tokenizer, a list is missing, or the splitter is unknown.
    """
    _check_kind(metadata.get("tokenizer.ggml.model"))
    for key in ("tokens", "merges"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise ModelError(f"a GGUF file must hold tokenizer.ggml.{key}, found none; convert the model again")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = list(metadata.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type must have {len(tokens)} entries, one a token; found {len(types)}")
    splitter = _splitter(metadata.get("tokenizer.ggml.pre"))

    def ids(name: str) -> Iterator[int]:
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        # Converters write 2³² - 1 for "none".
        if id is not None and 0 <= id < len(tokens):
            yield int(id)

    return Lists(
        tokens=tokens,
        types=types,
        merges=[_pair(merge) for merge in metadata["tokenizer.ggml.merges"]],
        splitter=splitter,
        bos=next(ids("bos"), None),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", splitter.add_bos)),
        named_specials={name: tokens[id] for name, key in _NAMES.items() for id in ids(key)},
        end_ids=frozenset(id for key in _END_KEYS for id in ids(key)),
    )


def build(lists: Lists) -> tokenizers.Tokenizer:
    """A tokenizer that parses control tokens, and adds none of its own accord.

    Raises:
        ModelError: a merge makes a token that the list of tokens has not.
    """
    vocab = {token: id for id, token in enumerate(lists.tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=lists.merges, ignore_merges=lists.splitter.ignore_merges)
    except Exception as error:  # The library raises nothing narrower.
        raise ModelError(f"tokenizer.ggml.merges must fit tokenizer.ggml.tokens: {error}") from error
    engine = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in lists.splitter.patterns]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_letters])
    if lists.splitter.nfc:
        engine.normalizer = normalizers.NFC()
    typed = list(zip(lists.types, lists.tokens, strict=True))
    engine.add_special_tokens([AddedToken(text, normalized=False) for type, text in typed if type in _CONTROL])
    engine.add_tokens([AddedToken(text, normalized=False) for type, text in typed if type == _USER_DEFINED])
    return engine


def pieces(lists: Lists) -> list[bytes]:
    """The bytes each token stands for."""
    as_text, as_byte, letters = Spelling(), Spelling(byte_tokens=True), Spelling(byte_level=True)
    spellings = {**dict.fromkeys((*_CONTROL, _USER_DEFINED), as_text), _BYTE: as_byte}
    typed = zip(lists.types, lists.tokens, strict=True)
    return [spellings.get(type, letters).read(token) for type, token in typed]


def _check_kind(model: str | None) -> None:
    if model == "llama":
        raise ModelError(
            "tokenizer.ggml.model must be gpt2 (byte-level BPE), found llama (SentencePiece), which is read only from "
            "a Hugging Face folder so far; use the model's folder with its tokenizer.json"
        )
    if model != "gpt2":
        raise ModelError(f"tokenizer.ggml.model must be gpt2 (byte-level BPE), found {model!r}")


def _splitter(name: str | None) -> Splitter:
    if name is None:
        log.warning(
            "tokenizer.ggml.pre is missing: the GGUF file does not say how its tokenizer splits text; splitting as "
            "GPT-2 does, which may give other tokens than the model was trained on; convert the model again"
        )
        return SPLITTERS["gpt2"]
    if name not in SPLITTERS:
        raise ModelError(f"tokenizer.ggml.pre must be one of {', '.join(sorted(SPLITTERS))}; found {name!r}")
    return SPLITTERS[name]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
