"""The contract of the slot `tokenizer`: texts there and back, piece by piece, and users who cannot write markers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st

from ..protocols import Rendered
from .contract import Contract, ensure, skip

STAND_IN = "\U00100042"


class TokenizerContract(Contract):
    """Encodes and decodes texts. Override `context` with the checkpoint that the tokenizer comes with.

    Attributes:
        texts: to be tried besides random ones.
        characters: that random texts are made of; empty: all of Unicode. A vocabulary may lack some bytes.
        lossless: every text comes back as it was.
    """

    slot = "tokenizer"
    texts: ClassVar[Sequence[str]] = ("Hello, world!", " two  spaces ", "Füße — 北京 👩‍👩‍👧", "a\n\n\tb", "")
    characters: ClassVar[str] = ""
    lossless: ClassVar[bool] = True

    @property
    def tokenizer(self) -> Any:
        """One for all cases: building it may take long, and it has no state."""
        if "_built" not in vars(type(self)):
            type(self)._built = self.build()
        return type(self)._built

    _built: ClassVar[Any]

    def plain(self, text: str) -> array[int]:
        """Tokens of *text*, nothing in it counting as a marker."""
        ids: array[int] = self.tokenizer.encode(text, parse_special=False, add_special=False)
        return ids

    def any_text(self) -> st.SearchStrategy[str]:
        """`texts`, and random ones."""
        alphabet = st.sampled_from(self.characters) if self.characters else st.characters(exclude_categories=["Cs"])
        return st.sampled_from(list(self.texts)) | st.text(alphabet, max_size=20)

    def any_ids(self) -> st.SearchStrategy[list[int]]:
        """Any tokens in any order."""
        return st.lists(st.integers(0, self.tokenizer.num_tokens - 1), max_size=20)

    def test_ids_are_in_the_vocabulary(self) -> None:
        def check(text: str) -> None:
            ids = self.plain(text)
            ensure(getattr(ids, "typecode", "") == "i", f"encode must return array('i'), found {ids!r}")
            inside = all(0 <= token_id < self.tokenizer.num_tokens for token_id in ids)
            ensure(inside, f"ids must lie below num_tokens ({self.tokenizer.num_tokens}), found {list(ids)}")

        self.for_all(self.any_text(), check=check)
        named = {"bos_id": [self.tokenizer.bos_id], "end_ids": self.tokenizer.end_ids}
        for name, ids in {**named, "specials": self.tokenizer.specials.values()}.items():
            inside = all(each is None or 0 <= each < self.tokenizer.num_tokens for each in ids)
            ensure(inside, f"{name} must lie below num_tokens ({self.tokenizer.num_tokens}), found {list(ids)}")

    def test_a_text_comes_back_as_it_was(self) -> None:
        if not self.lossless:
            skip("lossless = False")

        def check(text: str) -> None:
            found = self.tokenizer.decode(self.plain(text), skip_special=False)
            ensure(found == text, f"{text!r} must come back as it was, found {found!r}")

        self.for_all(self.any_text(), check=check)

    def test_piece_by_piece_is_the_whole(self) -> None:
        """Any tokens, also such that are no text together; and two answers at once do not mix."""

        def check(ids: list[int], skip_special: bool) -> None:
            decoders = [self.tokenizer.decoder(skip_special=skip_special) for _ in range(2)]
            texts = ["", ""]
            for token_id in ids:
                for i, decoder in enumerate(decoders):
                    texts[i] += decoder.feed(token_id)
            texts = [text + decoder.flush() for text, decoder in zip(texts, decoders, strict=True)]
            whole = self.tokenizer.decode(ids, skip_special=skip_special)
            ensure(texts == [whole, whole], f"{ids} must come to {whole!r} piece by piece, found {texts}")

        self.for_all(self.any_ids(), st.booleans(), check=check)

    def test_characters_come_whole(self) -> None:
        """No piece of one goes out while the rest is still to come."""

        def check(text: str) -> None:
            decoder = self.tokenizer.decoder(skip_special=False)
            pieces = [decoder.feed(token_id) for token_id in self.plain(text)]
            broken = "\ufffd" in "".join(pieces) and "\ufffd" not in text
            ensure(not broken, f"{text!r} must come in whole characters, found {pieces}")

        self.for_all(self.any_text(), check=check)

    def test_token_bytes_are_what_tokens_stand_for(self) -> None:
        """All that a text has, in order; some tokenizers put a space in front."""
        if not self.lossless:
            skip("lossless = False")

        def check(text: str) -> None:
            parts = [self.tokenizer.token_bytes(token_id) for token_id in self.plain(text)]
            ensure(all(isinstance(part, bytes) for part in parts), f"token_bytes must return bytes, found {parts}")
            whole = b"".join(parts)
            ensure(
                whole.lstrip() == text.encode().lstrip(b" "), f"the bytes of {text!r} must be its own, found {whole!r}"
            )

        self.for_all(self.any_text().map(lambda text: f"a{text}"), check=check)

    def test_markers_count_only_where_they_may(self) -> None:
        """With *parse_special* alone; what a user types is text."""
        self._need_specials()

        def check(marker: str, before: str, after: str) -> None:
            text, token_id = f"{before}{marker}{after}", self.tokenizer.specials[marker]
            parsed = self.tokenizer.encode(text, parse_special=True, add_special=False)
            ensure(token_id in parsed, f"{marker} must become {token_id} with parse_special, found {list(parsed)}")
            ids = self.plain(text)
            ensure(token_id not in ids, f"{marker} must stay text without parse_special, found {list(ids)}")

        words = st.sampled_from(["", "a", " ", "é"])
        self.for_all(st.sampled_from(sorted(self.tokenizer.specials)), words, words, check=check)

    def test_rendered_markers_count_and_typed_ones_do_not(self) -> None:
        self._need_specials()

        def check(marker: str, typed: str, word: str) -> None:
            rendered = Rendered(text=f"{marker}{word}{STAND_IN}{word}{marker}", stand_ins={STAND_IN: typed})
            ids = self.tokenizer.encode_rendered(rendered)
            count = ids.count(self.tokenizer.specials[marker])
            ensure(count == 2, f"{marker} written twice by the template must count twice, found {count} in {list(ids)}")
            text = self.tokenizer.decode(ids, skip_special=True)
            ensure(f"{word}{typed}{word}" in text, f"{typed} must stay what was typed, found {text!r}")

        markers = st.sampled_from(sorted(self.tokenizer.specials))
        self.for_all(markers, markers, st.sampled_from(["a", "b c", "é"]), check=check)

    def test_control_tokens_can_be_left_out(self) -> None:
        self._need_specials()
        for marker, token_id in self.tokenizer.specials.items():
            found = self.tokenizer.decode([token_id], skip_special=True)
            ensure(found == "", f"with skip_special {marker} must stand for nothing, found {found!r}")

    def test_a_text_begins_as_the_model_wants_it(self) -> None:
        """With *add_special*; and with one BOS, not two."""
        with_it = self.tokenizer.encode("a", parse_special=True, add_special=True)
        bos = self.tokenizer.bos_id
        ensure(self.plain("a")[:1] != array("i", [bos or -1]), "without add_special there must be no BOS")
        if bos is not None and with_it[:1] == array("i", [bos]):
            twice = self.tokenizer.decode([bos], skip_special=False) + "a"
            found = self.tokenizer.encode(twice, parse_special=True, add_special=True)
            ensure(found == with_it, f"a text that begins with BOS must get no second one, found {list(found)}")

    def _need_specials(self) -> None:
        if not self.tokenizer.specials:
            skip("the tokenizer has no control tokens")
