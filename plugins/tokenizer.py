"""The model's own tokenizer, from a GGUF file's lists or a folder's `tokenizer.json`, run by the `tokenizers` library.

A text can be read in two ways: with control tokens in it counting as such, or as nothing but text. Both readings are
set up once and never changed, so worker threads share them. Knows no chat template and no model.
"""

from __future__ import annotations

import codecs
import os
import re
import secrets
from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

import structlog
import tokenizers
from tokenizers import AddedToken

from ..hooks.errors import BadRequest, ModelError
from ..hooks.registry import plugin
from . import gguf_bpe, gguf_spm, tokenizer_json
from .gguf_lists import flag

if TYPE_CHECKING:
    from ..hooks.program import Checkpoint
    from ..hooks.protocols import Context, Register, Rendered

headrace_api = 1
log = structlog.get_logger()


class Decoder:
    """Bytes of tokens to whole characters, in about a microsecond a token, whatever came before."""

    __slots__ = ("_leading_spaces", "_pieces", "_utf8")

    def __init__(self, pieces: list[bytes], leading_spaces: int) -> None:
        self._pieces = pieces
        self._leading_spaces = leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._trim(self._utf8.decode(self._pieces[token_id])) if 0 <= token_id < len(self._pieces) else ""

    def flush(self) -> str:
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while self._leading_spaces and text:
            if text[0] == " ":
                text = text[1:]
                self._leading_spaces -= 1
            else:
                self._leading_spaces = 0
        return text


class ModelTokenizer:
    """Slot `tokenizer`.

    Args:
        engine: parses control tokens; taken over.
        pieces: the bytes each id stands for.
        leading_spaces: spaces the decoder takes from the start of a text, because the tokenizer put them there.
        prefix, suffix: ids that go before and after a text that is to have special tokens.
        named_specials: what templates call some control tokens, such as `bos_token` → its text.
        sentence: what is done to each text between control tokens, before *engine* sees it.

    Attributes:
        specials: text of each control token → its id.
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        *,
        pieces: list[bytes],
        leading_spaces: int,
        prefix: Iterable[int],
        end_ids: frozenset[int],
        named_specials: Mapping[str, str],
        suffix: Iterable[int] = (),
        sentence: Callable[[str], str] | None = None,
    ) -> None:
        # One request is one text: threads of the library's own would only compete with the compute thread.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        added = engine.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {token.content: id for id, token in added.items() if token.special}
        self.named_specials = named_specials
        self.num_tokens = len(pieces)
        self.end_ids = end_ids
        self.bos_id: int | None = engine.token_to_id(named_specials.get("bos_token", ""))
        self._prefix, self._suffix = array("i", prefix), array("i", suffix)
        self._sentence = sentence
        self._leading_spaces = leading_spaces
        self._pieces = pieces
        control_ids = set(self.specials.values())
        self._unmarked_pieces = [b"" if id in control_ids else piece for id, piece in enumerate(pieces)]
        self._parsing = engine
        self._any_added = _any_of(token.content for token in added.values())
        # A control token that the template wrote, in a text that is otherwise read as plain, goes by an alias that
        # nobody can guess. One pass over the whole text then gives the ids, and what the library does around added
        # tokens (strips spaces, leaves out the leading one) stays as it is.
        nonce = secrets.token_hex(16)
        self._aliases = {text: f"<|{nonce}:{id}|>" for text, id in self.specials.items()}
        self._alias_set = frozenset(self._aliases.values())
        names = {id: self._aliases.get(token.content, token.content) for id, token in added.items()}
        self._any_name = _any_of(names.values())
        self._plain = tokenizers.Tokenizer(engine.model)  # Shares the vocabulary.
        self._plain.normalizer = engine.normalizer
        self._plain.pre_tokenizer = engine.pre_tokenizer
        self._plain.add_tokens([_renamed(added[id], name) for id, name in sorted(names.items())])
        self._plain_ids = {self._plain.token_to_id(name): id for id, name in names.items()}
        if unsafe := [text for text, id in self.specials.items() if id in self._encode_plain(text)]:
            # A Unigram vocabulary is searched for any entry, control tokens included.
            log.warning("this tokenizer makes control tokens out of plain text: users can forge turns", tokens=unsafe)

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> array[int]:
        """See `protocols.Tokenizer`. A text that already begins with BOS gets no second one; nor an EOS at its end,
        where the model has one put there."""
        ids = self._encode_parsing(text) if parse_special else self._encode_plain(text)
        if not add_special:
            return ids
        if ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        return ids if ids[len(ids) - len(self._suffix) :] == self._suffix else ids + self._suffix

    def encode_rendered(self, rendered: Rendered) -> array[int]:
        """See `protocols.Tokenizer`."""
        if not rendered.stand_ins:
            return self._encode_parsing(rendered.text)
        text = self._any_added.sub(lambda match: self._aliases.get(match[0], match[0]), rendered.text)
        text = _any_of(rendered.stand_ins).sub(lambda match: rendered.stand_ins[match[0]], text)
        return self._encode_plain(text)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        """See `protocols.Tokenizer`. Ids that the tokenizer does not know stand for nothing."""
        decoder = self.decoder(skip_special=skip_special)
        return "".join(map(decoder.feed, token_ids)) + decoder.flush()

    def decoder(self, *, skip_special: bool) -> Decoder:
        return Decoder(self._unmarked_pieces if skip_special else self._pieces, self._leading_spaces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < self.num_tokens else b""

    def _encode_parsing(self, text: str) -> array[int]:
        return _encode(self._parsing, self._spelled(text, self._any_added, self.specials))

    def _encode_plain(self, text: str) -> array[int]:
        spelled = self._spelled(text, self._any_name, self._alias_set)
        return array("i", [self._plain_ids.get(id, id) for id in _encode(self._plain, spelled)])

    def _spelled(self, text: str, any_token: re.Pattern[str], controls: Container[str]) -> str:
        """*text* with each sentence between *controls* written as the engine wants it."""
        if self._sentence is None:
            return text
        written: list[str] = []
        start = 0
        for match in any_token.finditer(text):
            if match[0] in controls:
                written += self._sentence(text[start : match.start()]), match[0]
                start = match.end()
        return "".join(written) + self._sentence(text[start:])


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of *texts*; nothing at all if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and name == token.content,
    )


def _encode(engine: tokenizers.Tokenizer, text: str) -> array[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"text must be whole characters, found half a surrogate pair at character {error.start}; send valid Unicode"
        ) from error
    # Unlike `encode`, this lets go of the GIL.
    return array("i", engine.encode_batch_fast([text], add_special_tokens=False)[0].ids)


# ── from a checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────


def _from_gguf(checkpoint: Checkpoint) -> ModelTokenizer:
    metadata = checkpoint.metadata
    sentence: gguf_spm.Sentence | None = None
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        letters = gguf_bpe.read(metadata)
        lists, add_bos, engine = letters.lists, letters.splitter.add_bos, gguf_bpe.build(letters)
        pieces = gguf_bpe.pieces(lists)
    elif kind == "llama":
        scored = gguf_spm.read(metadata)
        lists, add_bos, engine = scored.lists, True, gguf_spm.build(scored)
        pieces, sentence = gguf_spm.pieces(lists), scored.sentence
    else:
        raise ModelError(
            f"tokenizer.ggml.model must be gpt2 (byte-level BPE) or llama (SentencePiece BPE), found {kind!r:.100}; "
            "use the model's folder with its tokenizer.json"
        )
    return ModelTokenizer(
        engine,
        pieces=pieces,
        leading_spaces=sentence.leading_spaces if sentence else 0,
        prefix=[lists.bos] if flag(metadata, "add_bos_token", add_bos) and lists.bos is not None else [],
        suffix=[lists.eos] if flag(metadata, "add_eos_token", False) and lists.eos is not None else [],
        end_ids=lists.end_ids | _generation_ends(checkpoint),
        named_specials=lists.named_specials,
        sentence=sentence.spell if sentence else None,
    )


def _from_folder(checkpoint: Checkpoint) -> ModelTokenizer:
    folder = checkpoint.artifact.path
    path = folder / "tokenizer.json"
    engine = tokenizer_json.load(path)
    spelling = tokenizer_json.spelling(engine, path)
    named = tokenizer_json.named_specials(folder)
    eos = engine.token_to_id(named.get("eos_token", ""))
    return ModelTokenizer(
        engine,
        pieces=tokenizer_json.pieces(engine, spelling),
        leading_spaces=spelling.leading_spaces,
        prefix=tokenizer_json.prefix(engine),
        end_ids=_generation_ends(checkpoint) | ({eos} if eos is not None else set()),
        named_specials=named,
    )


def _generation_ends(checkpoint: Checkpoint) -> frozenset[int]:
    ends = checkpoint.generation.get("eos_token_id")
    return frozenset(() if ends is None else ends if isinstance(ends, list) else [ends])


def tokenizer(context: Context, options: None) -> ModelTokenizer:
    """The tokenizer that came with the weights.

    Raises:
        ModelError: there is none, or none of a kind that can be read.
    """
    checkpoint = context.checkpoint
    assert checkpoint is not None, "the checkpoint is opened first"
    return _from_gguf(checkpoint) if checkpoint.artifact.kind == "gguf" else _from_folder(checkpoint)


@plugin
def register_tokenizer(register: Register) -> None:
    register("tokenizers", tokenizer, doc="The model's own, from its GGUF file or tokenizer.json.")
