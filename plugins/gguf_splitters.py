"""How a byte-level tokenizer cuts text before it merges: the table behind the names in `tokenizer.ggml.pre`.

A library of the `tokenizer` plugin. A GGUF file names the way and does not describe it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import structlog

from ..hooks.errors import ModelError

log = structlog.get_logger()


class Splitter(NamedTuple):
    """What a GGUF file leaves unsaid and means by `tokenizer.ggml.pre`.

    Attributes:
        patterns: applied one after the other; each match, and what lies between matches, becomes a piece.
        letter_patterns: applied likewise, after bytes have been written as letters.
        nfc: text is composed first.
        ignore_merges: a piece that is a token as a whole stays whole.
        add_bos: whether BOS goes in front where `add_bos_token` is missing.
    """

    patterns: tuple[str, ...]
    letter_patterns: tuple[str, ...] = ()
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_WITH_MARKS: Final = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS_WITHOUT_MARKS: Final = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
# A word may begin with capitals and then has small letters, or has none at all: `HTTPServer` is `HTTPServer`, `aB` is
# `a`, `B`.
_CAPITALS: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL_WORDS: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+"
_CAPITAL_WORDS: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*"
_CHINESE_AND_HANGUL: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CHINESE_AND_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# The letters that have a case as that model's authors list them: code points, for what looks like one of these letters
# may be another.
_CASED_RANGES: Final = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A
38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D
1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4
1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F
A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_CASED: Final = "".join("-".join(chr(int(end, 16)) for end in ends.split("-")) for ends in _CASED_RANGES.split())
_PUNCTUATION: Final = r"\p{P}$+<=>^~|"
_ASCII_SIGN_AND_WORD: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""


def _either(*patterns: str) -> tuple[str, ...]:
    return ("|".join(patterns),)


_PLAIN: Final = Splitter((_GPT2,))
_ONE_DIGIT: Final = Splitter((r"\p{N}", _GPT2))
_THREE_DIGITS: Final = Splitter(_either(_SUFFIXES, _WORDS, r"\p{N}{1,3}", _SIGNS, _SPACES))
_LLAMA3: Final = _THREE_DIGITS._replace(ignore_merges=True, add_bos=True)
_QWEN2: Final = Splitter(_either(_SUFFIXES, _WORDS, r"\p{N}", _SIGNS, _SPACES), nfc=True)
_GPT4O: Final = Splitter(
    _either(f"{_SMALL_WORDS}{_SUFFIXES}?", f"{_CAPITAL_WORDS}{_SUFFIXES}?", r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACES)
)
_BLOOM: Final = Splitter((r" ?[^(\s|.,!?…。，、।۔،)]+",))

SPLITTERS: Final[Mapping[str, Splitter]] = {
    "bloom": _BLOOM,
    "chatglm-bpe": _THREE_DIGITS,
    "codeshell": _ONE_DIGIT,
    "command-r": _ONE_DIGIT._replace(nfc=True),
    "dbrx": _THREE_DIGITS,
    "deepseek-coder": Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_AND_HANGUL, r"\p{N}")),
    "deepseek-llm": Splitter(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CHINESE_AND_HANGUL,
            r"\p{N}",
        )
    ),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": Splitter(
        (
            r"\p{N}{1,3}",
            _CHINESE_AND_KANA,
            *_either(_ASCII_SIGN_AND_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES),
        )
    ),
    "default": Splitter((rf"[{_PUNCTUATION}]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "exaone": _ONE_DIGIT,
    "exaone4": _PLAIN,
    "falcon": Splitter((rf"[{_PUNCTUATION}`]+", _GPT2), letter_patterns=(r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon3": _LLAMA3,
    "glm4": _THREE_DIGITS,
    "gpt-2": _PLAIN,
    "gpt-4o": _GPT4O,
    "gpt2": _PLAIN,
    "gpt3-finnish": _BLOOM,
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _GPT4O,
    "mellum": _PLAIN,
    "mpt": _PLAIN._replace(nfc=True),
    "olmo": _PLAIN._replace(nfc=True),
    "phi-2": _PLAIN,
    "poro-chat": _BLOOM,
    "qwen2": _QWEN2,
    "qwen35": Splitter(_either(_SUFFIXES, _WORDS_WITH_MARKS, r"\p{N}", _SIGNS_WITHOUT_MARKS, _SPACES), nfc=True),
    "refact": _ONE_DIGIT,
    "smaug-bpe": _THREE_DIGITS,
    "smollm": _ONE_DIGIT,
    "stablelm2": _QWEN2._replace(nfc=False),
    "starcoder": _ONE_DIGIT,
    "tekken": Splitter(
        _either(_SMALL_WORDS, _CAPITAL_WORDS, r"\p{N}", _SIGNS_AND_SLASHES, _SPACES), ignore_merges=True, add_bos=True
    ),
}
"""Sources: each model's published `tokenizer.json`; for `default`, for what is an alias of what, and for what goes with
a name besides patterns, the table of pre-tokenizers in llama.cpp's src/llama-vocab.cpp; composition as in
transformers' classes for Command R, GPT-NeoX (whose tokenizer MPT and OLMo share) and Qwen."""


def splitter(name: object) -> Splitter:
    """The splitter called *name*; GPT-2's, with a warning, where the file names none.

    Raises:
        ModelError: nothing is known under this name.
    """
    if name is None:
        log.warning(
            "tokenizer.ggml.pre is missing: the GGUF file does not say how its tokenizer splits text; splitting as "
            "GPT-2 does, which may give other tokens than the model was trained on; convert the model again"
        )
        return SPLITTERS["gpt2"]
    if not isinstance(name, str) or name not in SPLITTERS:
        raise ModelError(
            f"tokenizer.ggml.pre must be one of {', '.join(SPLITTERS)}; found {name!r:.100}; use a GGUF file that was "
            "converted under one of these names, or the model's folder with its tokenizer.json"
        )
    return SPLITTERS[name]
