"""Tokenizers from the lists of a GGUF file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.typing import EventDict

from headrace.hooks.errors import BadRequest, ModelError
from headrace.plugins import gguf_bpe
from headrace.plugins.tokenizer import ModelTokenizer
from tests.text.checkpoints import WordsOnly, build

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "cases" / "smollm2_tokens.jsonl").read_text("utf-8").splitlines()
]


def tiny(**entries: Any) -> dict[str, Any]:
    """The lists of a model that knows all bytes, `ab`, an end and a user-defined token."""
    tokens = [*bytes_as_letters(), "ab", "<end>", "<think>"]
    lists = {
        "model": "gpt2",
        "pre": "gpt2",
        "tokens": tokens,
        "token_type": [1] * 257 + [3, 4],
        "merges": ["a b"],
        "eos_token_id": 257,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**lists, **entries}.items() if value is not None}


def bytes_as_letters() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*map(chr, printable), *(chr(0x100 + i) for i in range(256 - len(printable)))]


def splits(name: str, text: str) -> list[str]:
    """The pieces that *name* cuts *text* into, in its own letters: `Ġ` is a space, `Ċ` a newline."""
    engine = gguf_bpe.build(gguf_bpe.read(tiny(pre=name)))
    return [piece for piece, _ in engine.pre_tokenizer.pre_tokenize_str(text)]


def test_all_collected_strings_have_the_ids_of_the_reference(smollm2: ModelTokenizer) -> None:
    assert len(CASES) == 795
    for case in CASES:
        ids = smollm2.encode(case["text"], parse_special=False, add_special=False)
        assert ids.tolist() == case["ids"], case["text"]


def test_control_tokens_have_the_ids_of_the_reference_where_they_are_parsed(smollm2: ModelTokenizer) -> None:
    marked = [case for case in CASES if "ids_with_special" in case]
    assert marked
    for case in CASES:
        ids = smollm2.encode(case["text"], parse_special=True, add_special=False)
        assert ids.tolist() == case.get("ids_with_special", case["ids"]), case["text"]


def test_the_lists_say_bos_ends_and_size(smollm2: ModelTokenizer) -> None:
    assert (smollm2.bos_id, smollm2.end_ids, smollm2.num_tokens) == (1, frozenset({2}), 49152)
    assert smollm2.specials["<|im_end|>"] == 2
    assert smollm2.named_specials["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("text", ["In 12345 we  had 3.14", "x=10\n\n  y", "Café déjà vu — 123 😊"])
def test_a_missing_splitter_is_a_loud_warning(
    smollm2_metadata: Mapping[str, Any], logs: list[EventDict], text: str
) -> None:
    metadata = {key: value for key, value in smollm2_metadata.items() if key != "tokenizer.ggml.pre"}
    found = build(WordsOnly(metadata=metadata))
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "tokenizer.ggml.pre" in logs[0]["event"]
    as_gpt2 = build(WordsOnly(metadata={**metadata, "tokenizer.ggml.pre": "gpt2"}))
    assert found.encode(text, parse_special=True, add_special=True) == as_gpt2.encode(
        text, parse_special=True, add_special=True
    )


def test_an_unknown_splitter_is_an_error_that_names_it_and_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"llama-bpe.*smollm.*'nosuch'"):
        build(WordsOnly(metadata=tiny(pre="nosuch")))


TEXT = "We've 12345 x=10!\n\n  Yé"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt2", ["We", "'ve", "Ġ12345", "Ġx", "=", "10", "!", "ĊĊĠ", "ĠYÃ©"]),
        ("smollm", ["We", "'ve", "Ġ", "1", "2", "3", "4", "5", "Ġx", "=", "1", "0", "!", "ĊĊĠ", "ĠYÃ©"]),
        ("llama-bpe", ["We", "'ve", "Ġ", "123", "45", "Ġx", "=", "10", "!ĊĊ", "Ġ", "ĠYÃ©"]),
        ("qwen2", ["We", "'ve", "Ġ", "1", "2", "3", "4", "5", "Ġx", "=", "1", "0", "!ĊĊ", "Ġ", "ĠYÃ©"]),
        ("default", ["We", "'", "ve", "Ġ", "123", "45", "Ġx", "=", "10", "!", "ĊĊĠ", "ĠYÃ©"]),
    ],
)
def test_each_splitter_cuts_words_digits_and_lines_its_own_way(name: str, pieces: list[str]) -> None:
    assert splits(name, TEXT) == pieces


def test_qwen35_keeps_combining_marks_with_their_letters() -> None:
    # Composition finds no single letter for q with an acute accent.
    assert splits("qwen35", "q\u0301a") == ["qÌģa"]
    assert splits("qwen2", "q\u0301a") == ["q", "Ìģa"]


def test_qwen2_composes_text_first() -> None:
    engine = build(WordsOnly(metadata=tiny(pre="qwen2")))
    decomposed, composed = (
        engine.encode(text, parse_special=True, add_special=False) for text in ("e\u0301", "\u00e9")
    )
    assert decomposed == composed


def test_llama3_puts_bos_in_front_unless_the_file_says_otherwise() -> None:
    entries = {"pre": "llama-bpe", "bos_token_id": 257}
    assert build(WordsOnly(metadata=tiny(**entries))).encode("a", parse_special=True, add_special=True)[0] == 257
    without = build(WordsOnly(metadata=tiny(**entries, add_bos_token=False)))
    assert len(without.encode("a", parse_special=True, add_special=True)) == 1


def test_eos_goes_behind_where_the_file_says_so() -> None:
    found = build(WordsOnly(metadata=tiny(add_eos_token=True)))
    assert found.encode("ab", parse_special=True, add_special=True).tolist() == [256, 257]
    assert found.encode("ab<end>", parse_special=True, add_special=True).tolist() == [256, 257]
    assert found.encode("ab", parse_special=True, add_special=False).tolist() == [256]


def test_user_defined_tokens_are_text_to_write_and_to_read() -> None:
    found = build(WordsOnly(metadata=tiny()))
    assert "<think>" not in found.specials
    for parse_special in (True, False):
        assert found.encode("<think>", parse_special=parse_special, add_special=False).tolist() == [258]
    assert found.decode([258, 257], skip_special=True) == "<think>"


def test_a_byte_token_stands_for_its_byte() -> None:
    lists = tiny()
    lists["tokenizer.ggml.tokens"].append("<0xE7>")
    lists["tokenizer.ggml.token_type"].append(6)
    assert build(WordsOnly(metadata=lists)).token_bytes(259) == b"\xe7"


def test_end_ids_join_eos_eot_and_the_generation_config() -> None:
    lists = tiny(eot_token_id=258, eom_token_id=2**32 - 1)
    assert build(WordsOnly(metadata=lists)).end_ids == {257, 258}
    assert build(WordsOnly(metadata=lists, generation={"eos_token_id": [1, 106]})).end_ids == {1, 106, 257, 258}
    assert build(WordsOnly(metadata=lists, generation={"eos_token_id": 0})).end_ids == {0, 257, 258}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": "bert"}, "must be gpt2 .*'bert'"),
        ({"model": None}, "must be gpt2 .*None"),
        ({"merges": None}, "tokenizer.ggml.merges, found none"),
        ({"merges": ["a nothing"]}, "merges must fit"),
        ({"merges": [1]}, "merges must be a list of str"),
        ({"merges": "a b"}, "merges must be a list of str"),
        ({"pre": 3}, "tokenizer.ggml.pre must be one of .* found 3"),
        ({"token_type": [1]}, "259 entries"),
    ],
)
def test_lists_that_make_no_tokenizer_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(WordsOnly(metadata=tiny(**entries)))


def test_half_a_surrogate_pair_is_the_clients_mistake(smollm2: ModelTokenizer) -> None:
    with pytest.raises(BadRequest, match="character 1"):
        smollm2.encode("a\ud83d", parse_special=True, add_special=False)


def test_the_library_starts_no_threads_of_its_own(smollm2: ModelTokenizer) -> None:
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
