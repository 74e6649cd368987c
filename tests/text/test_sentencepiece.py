"""SentencePiece tokenizers from GGUF files, against the `sentencepiece` library on the model they were made from."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from sentencepiece import SentencePieceProcessor

from headrace.hooks.errors import ModelError
from headrace.hooks.protocols import Artifact, Rendered
from headrace.plugins.gguf import GGUFLoader
from headrace.plugins.tokenizer import ModelTokenizer
from tests.text.checkpoints import WordsOnly, build

USER_DEFINED = ["<sep>", "<sep>x", "▁▁▁▁"]
WORDS = [
    "the", "quick", "brown", "foxes", "jump", "over", "lazy", "dogs", "banana", "bananas", "abab", "1234", "2025",
    "café", "ça", "und", "über", "北京", "東京都", "こんにちは",
]  # fmt: skip
STRANGE = [
    " ", "  ", "   ", "      ", "\n", "\n\n", "\t", "\r\n", "\0", "▁",
    "😀", "👩‍👩‍👧", "한국", "ﬁ", "e\u0301", "\u3000", "aaaa", "abababa",
    "x", "<sep>", "<sep>x", "<sep", "<|im|>", "<s>", "</s>", "<unk>", "<0x41>", "the", "b", "a",
]  # fmt: skip
SETTINGS = {
    "prefix": {"add_dummy_prefix": True, "remove_extra_whitespaces": False},
    "no prefix": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "tidy": {"add_dummy_prefix": True, "remove_extra_whitespaces": True},
}


def sentences() -> Iterator[str]:
    draw = random.Random(2)
    for _ in range(400):
        letters = "".join(draw.choices("ab c", k=9))
        yield " ".join(draw.choices(WORDS, k=8)) + " " * draw.randrange(6) + letters


def train(settings: Mapping[str, bool], *, model_type: str = "bpe") -> SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_writer=model,
        model_type=model_type,
        vocab_size=560,
        byte_fallback=True,
        user_defined_symbols=USER_DEFINED,
        control_symbols=["<|im|>"],
        normalization_rule_name="identity",
        split_by_whitespace=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


def kind(model: SentencePieceProcessor, id: int) -> gguf.TokenType:
    if model.id_to_piece(id) in USER_DEFINED:
        return gguf.TokenType.USER_DEFINED
    if model.is_unknown(id):
        return gguf.TokenType.UNKNOWN
    if model.is_control(id):
        return gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if model.is_byte(id) else gguf.TokenType.NORMAL


def save(model: SentencePieceProcessor, path: Path, settings: Mapping[str, bool], **changes: Any) -> Path:
    """*model* as a GGUF file, its user-defined spaces as converters write them."""
    ids = range(model.get_piece_size())
    kinds = [kind(model, id) for id in ids]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    pieces = [model.id_to_piece(id) for id in ids]
    writer.add_token_list(
        [p.replace("▁", " ") if k == gguf.TokenType.USER_DEFINED else p for p, k in zip(pieces, kinds, strict=True)]
    )
    writer.add_token_scores([model.get_score(id) for id in ids])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_add_space_prefix(settings["add_dummy_prefix"])
    writer.add_remove_extra_whitespaces(settings["remove_extra_whitespaces"])
    for key, value in changes.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(path: Path) -> Mapping[str, Any]:
    checkpoint = GGUFLoader().open(Artifact(kind="gguf", path=path, name="x"))
    found = checkpoint.metadata
    checkpoint.close()
    return found


def load(path: Path) -> ModelTokenizer:
    return build(WordsOnly(metadata=metadata(path)))


@pytest.fixture(scope="module", params=SETTINGS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SentencePieceProcessor, ModelTokenizer]:
    """A model and its GGUF file's tokenizer."""
    settings = SETTINGS[request.param]
    model = train(settings)
    return model, load(save(model, tmp_path_factory.mktemp("spm") / "x.gguf", settings))


@pytest.fixture(scope="module")
def model() -> SentencePieceProcessor:
    return train(SETTINGS["prefix"])


@pytest.fixture(scope="module")
def path(model: SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("spm") / "x.gguf", SETTINGS["prefix"])


def texts(count: int) -> list[str]:
    draw = random.Random(7)
    return ["", " ", *("".join(draw.choices(WORDS + STRANGE, k=draw.randrange(14))) for _ in range(count - 2))]


def test_2000_strings_have_the_ids_of_the_reference(pair: tuple[SentencePieceProcessor, ModelTokenizer]) -> None:
    model, found = pair
    for text in texts(2000):
        assert found.encode(text, parse_special=False, add_special=False).tolist() == model.encode(text), repr(text)


def test_2000_strings_come_back_as_from_the_reference(pair: tuple[SentencePieceProcessor, ModelTokenizer]) -> None:
    model, found = pair
    # A text of nothing but ▁ is the one in which the reference takes tidied spaces for a start and keeps some.
    for ids in map(model.encode, [text for text in texts(2000) if "▁" not in text]):
        assert found.decode(ids, skip_special=True) == model.decode(ids), model.decode(ids)


def test_a_long_text_has_the_ids_of_the_reference(pair: tuple[SentencePieceProcessor, ModelTokenizer]) -> None:
    model, found = pair
    text = " ".join(texts(400))
    assert len(text) > 5000
    assert found.encode(text, parse_special=False, add_special=False).tolist() == model.encode(text)


def test_text_comes_in_pieces_as_it_comes_at_once(model: SentencePieceProcessor, path: Path) -> None:
    decoder = load(path).decoder(skip_special=True)
    ids = model.encode("한국 😀 über")
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == "한국 😀 über"


def test_control_tokens_count_where_they_are_parsed_and_each_sentence_starts_anew(
    model: SentencePieceProcessor, path: Path
) -> None:
    ids = load(path).encode("<s>the fox<|im|>北京</s>", parse_special=True, add_special=True)
    control = [model.piece_to_id(piece) for piece in ("<s>", "<|im|>", "</s>")]
    assert ids.tolist() == [control[0], *model.encode("the fox"), control[1], *model.encode("北京"), control[2]]


def test_markers_of_a_user_stay_text_in_a_rendered_conversation(model: SentencePieceProcessor, path: Path) -> None:
    rendered = Rendered(text="<|im|>say \ue000 twice</s>", stand_ins={"\ue000": "<|im|><sep>"})
    ids = load(path).encode_rendered(rendered)
    control = [model.piece_to_id(piece) for piece in ("<|im|>", "</s>")]
    assert ids.tolist() == [control[0], *model.encode("say <|im|><sep> twice"), control[1]]


def test_bos_goes_in_front_and_eos_behind_as_the_file_says(
    model: SentencePieceProcessor, path: Path, tmp_path: Path
) -> None:
    words = model.encode("the fox")
    assert load(path).encode("the fox", parse_special=True, add_special=True).tolist() == [1, *words]
    both = load(save(model, tmp_path / "both.gguf", SETTINGS["prefix"], add_bos_token=True, add_eos_token=True))
    assert both.encode("the fox", parse_special=True, add_special=True).tolist() == [1, *words, 2]
    assert both.encode("<s>the fox</s>", parse_special=True, add_special=True).tolist() == [1, *words, 2]
    none = load(save(model, tmp_path / "none.gguf", SETTINGS["prefix"], add_bos_token=False))
    assert none.encode("the fox", parse_special=True, add_special=True).tolist() == words


def test_pieces_stand_for_their_bytes(model: SentencePieceProcessor, path: Path) -> None:
    found = load(path)
    assert found.token_bytes(model.piece_to_id("<0xE7>")) == b"\xe7"
    assert found.token_bytes(model.piece_to_id("▁▁▁▁")) == b"    "
    assert found.token_bytes(model.piece_to_id("<|im|>")) == b"<|im|>"
    assert found.specials == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im|>": model.piece_to_id("<|im|>")}


def tiny(**changes: Any) -> WordsOnly:
    """A vocabulary as Gemma has it: two tabs are a piece, one is not and goes by its byte."""
    lists = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "<0x09>", "\t\t", "a", "aa", "aaa"],
        "scores": [0.0, 0.0, 0.0, -1.0, -4.0, -2.0, -3.0],
        "token_type": [2, 3, 6, 1, 1, 1, 1],
        "bos_token_id": 1,
        "add_space_prefix": False,
    }
    entries = {**lists, **changes}
    return WordsOnly(metadata={f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None})


def test_a_letter_that_is_only_a_byte_can_still_be_part_of_a_piece() -> None:
    found = build(tiny())
    ids = [found.encode(text, parse_special=False, add_special=False).tolist() for text in ("\t", "\t\t", "\t\t\t")]
    assert ids == [[2], [3], [3, 2]]


def test_the_highest_score_is_joined_first_and_of_equals_the_leftmost() -> None:
    assert build(tiny()).encode("aaaaa", parse_special=False, add_special=False).tolist() == [5, 6]


def test_a_score_that_is_no_number_is_joined_last() -> None:
    scores = [0.0, 0.0, 0.0, -1.0, -4.0, -2.0, float("nan")]
    assert build(tiny(scores=scores)).encode("aaa", parse_special=False, add_special=False).tolist() == [6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "must be gpt2 .* or llama .*'t5'; use the model's folder"),
        ({"model": 5}, "must be gpt2 .* or llama .*5"),
        ({"tokens": None}, "tokenizer.ggml.tokens, found none"),
        ({"tokens": []}, "an empty list"),
        ({"tokens": 7}, "tokens must be a list of str"),
        ({"tokens": ["a", 1]}, "tokens must be a list of str"),
        ({"tokens": ["a" * 1025] * 7}, "at most 1024 characters, found 1025"),
        ({"scores": None}, "tokenizer.ggml.scores, found none"),
        ({"scores": [1.0]}, "scores must have 7 entries"),
        ({"scores": ["a"] * 7}, "scores must be a list of float"),
        ({"token_type": [1]}, "token_type must have 7 entries"),
        ({"token_type": [1.0] * 7}, "token_type must be a list of int"),
        ({"token_type": [1] * 7, "tokens": ["a"] * 7}, None),
        ({"add_space_prefix": 3}, "add_space_prefix must be true or false, found 3"),
        ({"bos_token_id": "x"}, None),
        ({"token_type": [9] * 7}, None),
    ],
)
def test_lists_that_make_no_tokenizer_are_refused(changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert build(tiny(**changes)).num_tokens == 7
        return
    with pytest.raises(ModelError, match=message):
        build(tiny(**changes))
