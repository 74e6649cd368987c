"""Tokenizers from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.typing import EventDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from headrace.hooks.errors import ModelError
from headrace.plugins import gguf_bpe
from headrace.plugins.tokenizer import ModelTokenizer
from tests.text.checkpoints import WordsOnly, build, folder_of, sentencepiece


def test_a_byte_level_file_gives_what_the_gguf_file_gives(
    smollm2: ModelTokenizer, smollm2_metadata: Mapping[str, Any], tmp_path: Path
) -> None:
    engine = gguf_bpe.build(gguf_bpe.read(smollm2_metadata))
    engine.decoder = decoders.ByteLevel()
    found = build(folder_of(engine, tmp_path, bos_token="<|im_start|>", eos_token="<|im_end|>"))
    assert (found.bos_id, found.end_ids, found.num_tokens) == (smollm2.bos_id, smollm2.end_ids, smollm2.num_tokens)
    assert found.specials == smollm2.specials
    assert [*map(found.token_bytes, range(49152))] == [*map(smollm2.token_bytes, range(49152))]


def test_bos_goes_in_front_once_where_the_file_says_so(tmp_path: Path) -> None:
    found = build(sentencepiece(tmp_path))
    assert found.encode("a", parse_special=True, add_special=True).tolist() == [1, 264]
    assert found.encode("<s>a", parse_special=True, add_special=True).tolist() == [1, 264]
    assert found.encode("a", parse_special=True, add_special=False).tolist() == [264]


def test_a_bos_that_a_user_wrote_as_text_is_none(tmp_path: Path) -> None:
    found = build(sentencepiece(tmp_path))
    ids = found.encode("<s>", parse_special=False, add_special=True)
    assert ids[0] == 1
    assert 1 not in ids[1:]


@pytest.mark.parametrize(
    ("generation", "ends"), [({"eos_token_id": [1, 106]}, {1, 2, 106}), ({"eos_token_id": 0}, {0, 2}), ({}, {2})]
)
def test_end_ids_join_the_tokenizer_and_the_generation_config(
    tmp_path: Path, generation: dict[str, Any], ends: set[int]
) -> None:
    sentencepiece(tmp_path)
    assert build(WordsOnly(folder=tmp_path, generation=generation)).end_ids == ends


def test_the_older_map_of_special_tokens_is_read_too(tmp_path: Path) -> None:
    sentencepiece(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert build(WordsOnly(folder=tmp_path)).named_specials == {"eos_token": "</s>"}


def test_the_limits_of_training_do_not_bind(tmp_path: Path) -> None:
    sentencepiece(tmp_path)
    engine = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    engine.enable_truncation(3)
    engine.enable_padding(length=64)
    found = build(folder_of(engine, tmp_path))
    assert len(found.encode("a b c a b c", parse_special=True, add_special=False)) > 3
    assert found.encode("a", parse_special=True, add_special=False).tolist() == [264]


def test_added_tokens_outside_the_vocabulary_keep_their_ids_in_both_readings(tmp_path: Path) -> None:
    engine = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken("<s>", normalized=False)])
    engine.add_tokens([AddedToken("<tool>", normalized=False)])
    found = build(folder_of(engine, tmp_path))
    for parse_special in (True, False):
        assert found.encode("a<tool>", parse_special=parse_special, add_special=False).tolist() == [0, 2]


def test_a_vocabulary_that_forges_control_tokens_is_a_warning(tmp_path: Path, logs: list[EventDict]) -> None:
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("▁", -2.0), *((letter, -9.0) for letter in "</s>")]
    engine = Tokenizer(models.Unigram(pieces, 0, False))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    engine.add_special_tokens([AddedToken("</s>", normalized=False)])
    build(folder_of(engine, tmp_path))
    assert [(entry["log_level"], entry["tokens"]) for entry in logs] == [("warning", ["</s>"])]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "must hold tokenizer.json, found none"),
        ("tokenizer.json", "{", "not a tokenizer that can be read"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, found list"),
    ],
)
def test_a_broken_folder_is_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    sentencepiece(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        build(WordsOnly(folder=tmp_path))


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None])
def test_a_decoder_that_is_not_known_is_refused(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    engine = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    engine.decoder = decoder
    with pytest.raises(ModelError, match="decoder must be made of ByteLevel"):
        build(folder_of(engine, tmp_path))


def test_what_a_post_processor_adds_behind_a_text_is_left_out(tmp_path: Path) -> None:
    sentencepiece(tmp_path)
    engine = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    both = [("<s>", 1), ("</s>", 2)]
    engine.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=both)
    found = build(folder_of(engine, tmp_path))
    assert found.encode("a", parse_special=True, add_special=True).tolist() == [1, 264]
