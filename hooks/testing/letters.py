"""A tokenizer for tests: the bytes of UTF-8 are its tokens, and a few control tokens stand behind them."""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence

from ..protocols import Rendered

SPECIALS = ("<|start|>", "<|end|>", "<|begin|>")


class Letters:
    """Implements `protocols.Tokenizer`. *specials* count from 256: one to start, one that ends, one that begins."""

    def __init__(self, specials: Sequence[str] = SPECIALS) -> None:
        self.specials: Mapping[str, int] = {text: 256 + i for i, text in enumerate(specials)}
        self.named_specials: Mapping[str, str] = {"eos_token": specials[1], "bos_token": specials[2]}
        self.num_tokens = 256 + len(specials)
        self.bos_id: int | None = 258
        self.end_ids = frozenset({257})
        self._names = {token_id: text for text, token_id in self.specials.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, specials)) + ")")

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> array[int]:
        """See `protocols.Tokenizer`."""
        ids = array("i", [self.bos_id or 0] if add_special else [])
        for part in self._split.split(text) if parse_special else [text]:
            ids.extend([self.specials[part]] if part in self.specials and parse_special else part.encode())
        return ids

    def encode_rendered(self, rendered: Rendered) -> array[int]:
        """See `protocols.Tokenizer`."""
        ids = array("i")
        for part in self._split.split(rendered.text):
            typed = "".join(rendered.stand_ins.get(character, character) for character in part)
            ids.extend([self.specials[part]] if part in self.specials else typed.encode())
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        """See `protocols.Tokenizer`."""
        decoder = self.decoder(skip_special=skip_special)
        return "".join(map(decoder.feed, token_ids)) + decoder.flush()

    def decoder(self, *, skip_special: bool) -> LettersDecoder:
        """See `protocols.Tokenizer`."""
        return LettersDecoder({} if skip_special else self._names)

    def token_bytes(self, token_id: int) -> bytes:
        """See `protocols.Tokenizer`."""
        return bytes([token_id]) if token_id < 256 else self._names[token_id].encode()


class LettersDecoder:
    """Bytes to whole characters. *names*: of control tokens that are shown."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that a token completes."""
        return self._utf8.decode(bytes([token_id]) if token_id < 256 else self._names.get(token_id, "").encode())

    def flush(self) -> str:
        """What is left."""
        return self._utf8.decode(b"", final=True)
