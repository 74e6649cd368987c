"""Token by token, the text is the text of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from headrace.plugins import gguf_bpe
from headrace.plugins.tokenizer import ModelTokenizer
from tests.text.checkpoints import build, folder_of, sentencepiece


def streamed(tokenizer: ModelTokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    decoder = tokenizer.decoder(skip_special=skip_special)
    return [*map(decoder.feed, ids), decoder.flush()]


@cache
def spm() -> ModelTokenizer:
    with TemporaryDirectory() as folder:
        return build(sentencepiece(Path(folder)))


@pytest.fixture(scope="session")
def library(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    engine = gguf_bpe.build(gguf_bpe.read(smollm2_metadata))
    engine.decoder = decoders.ByteLevel()
    return engine


@given(ids=st.lists(st.integers(0, 49160), max_size=60), skip_special=st.booleans())
@settings(max_examples=300)
def test_byte_level_streams_equal_the_bytes_of_the_whole(
    smollm2: ModelTokenizer, ids: list[int], skip_special: bool
) -> None:
    kept = [id for id in ids if not (skip_special and id in smollm2.specials.values())]
    whole = b"".join(map(smollm2.token_bytes, kept)).decode("utf-8", "replace")
    assert "".join(streamed(smollm2, ids, skip_special=skip_special)) == whole
    assert smollm2.decode(ids, skip_special=skip_special) == whole


@given(ids=st.lists(st.integers(0, 270), max_size=40), skip_special=st.booleans())
def test_sentencepiece_streams_equal_the_bytes_of_the_whole(ids: list[int], skip_special: bool) -> None:
    kept = [id for id in ids if not (skip_special and id < 3)]
    whole = b"".join(map(spm().token_bytes, kept)).decode("utf-8", "replace").removeprefix(" ")
    assert "".join(streamed(spm(), ids, skip_special=skip_special)) == whole


@given(st.text(max_size=40))
def test_byte_level_text_is_what_the_librarys_own_decoder_says(
    smollm2: ModelTokenizer, library: Tokenizer, text: str
) -> None:
    ids = smollm2.encode(text, parse_special=True, add_special=False).tolist()
    for skip_special in (True, False):
        assert smollm2.decode(ids, skip_special=skip_special) == library.decode(ids, skip_special)


@given(st.text("ab北é😀 \n<>", max_size=30))
def test_sentencepiece_text_comes_back(text: str) -> None:
    ids = spm().encode(text, parse_special=False, add_special=True)
    assert spm().decode(ids, skip_special=True) == text


def test_half_an_emoji_waits_for_its_other_half(smollm2: ModelTokenizer) -> None:
    ids = smollm2.encode("🦜🦜", parse_special=True, add_special=False).tolist()
    texts = streamed(smollm2, ids)
    assert len(ids) > 2
    assert "".join(texts) == "🦜🦜"
    assert all(text in ("", "🦜") for text in texts)


def test_an_emoji_cut_short_is_one_replacement_character_at_the_end(smollm2: ModelTokenizer) -> None:
    ids = smollm2.encode("ok 🦜", parse_special=True, add_special=False).tolist()[:-1]
    texts = streamed(smollm2, ids)
    assert "".join(texts) == smollm2.decode(ids, skip_special=True) == "ok \ufffd"
    assert texts[-1] == "\ufffd"


def test_the_first_space_stays(smollm2: ModelTokenizer) -> None:
    ids = smollm2.encode(" world world", parse_special=True, add_special=False).tolist()
    assert streamed(smollm2, ids) == [" world", " world", ""]


def test_sentencepiece_drops_the_one_space_it_put_there() -> None:
    ids = spm().encode("  a", parse_special=True, add_special=False).tolist()
    assert streamed(spm(), ids) == ["", " ", " a", ""]


def test_byte_tokens_become_characters_and_not_their_names() -> None:
    ids = [265, 3 + 0xE7, 3 + 0x88, 3 + 0xBF, 3 + 0x0A]
    assert streamed(spm(), ids) == ["北", "", "", "爿", "\n", ""]


def test_a_lone_byte_at_the_end_is_one_replacement_character() -> None:
    assert streamed(spm(), [260, 3 + 0xE7]) == ["北", "", "\ufffd"]


def test_control_tokens_are_shown_only_where_asked_for(smollm2: ModelTokenizer) -> None:
    ids = smollm2.encode("<|im_start|>a<|im_end|>", parse_special=True, add_special=False).tolist()
    assert streamed(smollm2, ids) == ["", "a", "", ""]
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"


def test_ids_beyond_the_tokenizer_are_no_text(smollm2: ModelTokenizer) -> None:
    assert streamed(smollm2, [-1, 49152, 10**6]) == ["", "", "", ""]
    assert smollm2.token_bytes(49152) == smollm2.token_bytes(-1) == b""


@pytest.mark.parametrize(("scheme", "text"), [("always", "ab"), ("first", "ab"), ("never", " ab")])
def test_metaspace_drops_a_first_space_only_where_it_adds_one(tmp_path: Path, scheme: str, text: str) -> None:
    engine = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1, "▁": 2, "a": 3}, merges=[("▁", "a")]))
    engine.decoder = decoders.Metaspace("▁", scheme)
    found = build(folder_of(engine, tmp_path))
    assert found.decode([0, 1], skip_special=True) == engine.decode([0, 1]) == text


def test_what_is_no_byte_letter_stands_for_itself(tmp_path: Path) -> None:
    engine = Tokenizer(models.BPE(vocab={"Ġa": 0, "北": 1, "a b": 2, "\u00a0": 3}, merges=[]))
    engine.decoder = decoders.ByteLevel()
    found = build(folder_of(engine, tmp_path))
    assert [*map(found.token_bytes, range(4))] == [b" a", "北".encode(), b"a b", "\u00a0".encode()]
