"""Each way to split text that a GGUF file can name, against `tokenizers` set up as the model's authors publish it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from headrace.hooks.protocols import Artifact
from headrace.plugins.gguf import GGUFLoader
from headrace.plugins.gguf_splitters import SPLITTERS
from tests.text.checkpoints import WordsOnly, build

LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS_AND_LETTERS = {**LETTERS, "use_regex": True}
ONE_DIGIT = {"type": "Digits", "individual_digits": True}
DIGITS = {"type": "Digits", "individual_digits": False}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHINESE = split("[一-龥ࠀ-一가-퟿]+")
# What is a letter with a case here is written as ranges there; no text of this test tells the two apart.
DEEPSEEK_LLM = [
    split("[\r\n]"),
    split(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
    split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    split(r"\s+$"),
]

PUBLISHED: dict[str, tuple[Sequence[dict[str, Any]], bool]] = {
    "gpt-2": ([WORDS_AND_LETTERS], False),
    "olmo": ([WORDS_AND_LETTERS], True),
    "smollm": ([ONE_DIGIT, WORDS_AND_LETTERS], False),
    "command-r": ([ONE_DIGIT, WORDS_AND_LETTERS], True),
    "llama-bpe": ([split(CL100K % "{1,3}"), LETTERS], False),
    "dbrx": ([split(CL100K % "{1,3}"), LETTERS], False),
    "qwen2": ([split(CL100K % ""), LETTERS], True),
    "stablelm2": ([split(CL100K % ""), LETTERS], False),
    "qwen35": ([split(QWEN35), LETTERS], True),
    "gpt-4o": ([split(O200K % (O200K_SUFFIX, O200K_SUFFIX, "{1,3}")), LETTERS], False),
    "tekken": ([split(O200K % ("", "", "")), LETTERS], False),
    "deepseek-v3": ([split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), LETTERS], False),
    "deepseek-coder": (
        [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), CHINESE, ONE_DIGIT, LETTERS],
        False,
    ),
    "deepseek-llm": ([*DEEPSEEK_LLM, CHINESE, ONE_DIGIT, LETTERS], False),
    "falcon": (
        [{"type": "Punctuation", "behavior": "Contiguous"}, WORDS_AND_LETTERS, DIGITS, split("[0-9][0-9][0-9]")],
        False,
    ),
    "default": (
        [split(r"[\p{P}$+<=>^~|]+"), split(GPT2), DIGITS, split("[0-9][0-9][0-9]"), LETTERS],
        False,
    ),
    "bloom": ([split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), LETTERS], False),
}
"""Name → what its `tokenizer.json` has under `pre_tokenizer`, and whether it composes text."""
SAME = {
    "gpt-2": ["gpt2", "phi-2", "mellum", "exaone4"],
    "olmo": ["mpt"],
    "smollm": ["starcoder", "refact", "codeshell", "exaone"],
    "llama-bpe": ["llama3", "llama-v3", "falcon3", "lfm2"],
    "dbrx": ["smaug-bpe", "chatglm-bpe", "glm4"],
    "qwen2": ["deepseek-r1-qwen"],
    "gpt-4o": ["llama4"],
    "bloom": ["poro-chat", "gpt3-finnish"],
}
ATOMS = [
    "the", "The", "HTTPServer", "iPhone", "don't", "WE'LL", "we'Ve", "x'd", "été",
    "e\u0301t\u0301", "q\u0301", "ЖЖжж", "ǅ", "ʰ", "北京", "東京", "こんにちは", "カタカナ", "한국어", "हिन्दी",
    "١٢٣", "1", "12", "123456789", "3.14", "²", "½", "ⅷ", "😀", "👩‍👩‍👧", "…", "。", "،", "«", "„",
    "¿", "$", "+=", "<|>", "`~^", "(a)", "/*", "//\n", "#!", "\\", "_x_", "snake_case",
    "https://a.b/c?d=1", "<end>", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n",
    "\u00a0", "\u3000", "\u200b", "!", "?", "...", "\ufeff", "\0",
]  # fmt: skip


def texts(count: int) -> list[str]:
    draw = random.Random(13)
    return ["".join(draw.choices(ATOMS, k=draw.randrange(1, 12))) for _ in range(count)]


def published(name: str) -> Tokenizer:
    """A small tokenizer trained on such texts, split as the authors of *name* split."""
    steps, composes = PUBLISHED[name]
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence([])
    if composes:
        engine.normalizer = normalizers.NFC()
    parts = json.loads(engine.to_str())
    parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    engine = Tokenizer.from_str(json.dumps(parts))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(
        texts(300), trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    engine.add_special_tokens([AddedToken("<end>", normalized=False)])
    parts = json.loads(engine.to_str())
    parts["model"]["ignore_merges"] = SPLITTERS[name].ignore_merges
    return Tokenizer.from_str(json.dumps(parts))


def save(engine: Tokenizer, pre: str, path: Path) -> Path:
    """*engine*'s vocabulary and merges as a GGUF file that says *pre*."""
    model = json.loads(engine.to_str())["model"]
    vocab = engine.get_vocab()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<end>" else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_name_has_its_published_counterpart_here() -> None:
    known = [*PUBLISHED, *(alias for aliases in SAME.values() for alias in aliases)]
    assert sorted(known) == sorted(SPLITTERS)


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name, aliases in SAME.items() for alias in aliases])
def test_an_alias_means_the_same(name: str, alias: str) -> None:
    mine, other = SPLITTERS[alias], SPLITTERS[name]
    assert (mine.patterns, mine.letter_patterns, mine.nfc) == (other.patterns, other.letter_patterns, other.nfc)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_gguf_file_gives_the_ids_of_the_reference(name: str, tmp_path: Path) -> None:
    reference = published(name)
    checkpoint = GGUFLoader().open(Artifact(kind="gguf", path=save(reference, name, tmp_path / "x.gguf"), name="x"))
    found = build(WordsOnly(metadata=checkpoint.metadata))
    checkpoint.close()

    for text in texts(1000):
        ids = found.encode(text, parse_special=True, add_special=False).tolist()
        assert ids == reference.encode(text, add_special_tokens=False).ids, repr(text)
