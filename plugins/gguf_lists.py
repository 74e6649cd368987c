"""The tokenizer's part of a GGUF file's metadata: lists of tokens and their types, and the ids that have a name.

A library of the `tokenizer` plugin. The file is not trusted: every entry is checked for its type before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer

from ..hooks.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens, in GGUF's numbers."""
MAX_TOKEN_LENGTH: Final = 1024
"""Characters. The longest known are runs of a few hundred spaces; time to set up grows with the square."""

_NAMES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # As the format spells it.
    "pad_token": "padding",
    "mask_token": "mask",
}
_END_KEYS: Final = ("eos", "eot", "eom")


class Lists(NamedTuple):
    """Tokens and what is said about them.

    Attributes:
        tokens, types: an entry for each id.
        bos, eos: ids, or None.
        named_specials: what templates call some tokens, such as `bos_token` → its text.
        end_ids: tokens that end an answer.
    """

    tokens: list[str]
    types: list[int]
    bos: int | None
    eos: int | None
    named_specials: dict[str, str]
    end_ids: frozenset[int]

    def is_special(self, id: int) -> bool:
        """Whether *id* is a control token (or the one for what is unknown)."""
        return self.types[id] in (UNKNOWN, CONTROL)


def read_lists(metadata: Mapping[str, Any]) -> Lists:
    """Pick the lists out of *metadata* and check that they belong together.

    Raises:
        ModelError: a list is missing, of another type or length than it must be, or holds a token of a wrong length.
    """
    tokens = entries(metadata, "tokens", str)
    _check_lengths(tokens)
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = entries(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type must have {len(tokens)} entries, one a token; found {len(types)}")

    def id_of(name: str) -> int | None:
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        # Converters write 2³² - 1 for "none".
        return id if isinstance(id, int) and 0 <= id < len(tokens) else None

    named = {name: id_of(key) for name, key in _NAMES.items()}
    return Lists(
        tokens=tokens,
        types=types,
        bos=named["bos_token"],
        eos=named["eos_token"],
        named_specials={name: tokens[id] for name, id in named.items() if id is not None},
        end_ids=frozenset(id for id in map(id_of, _END_KEYS) if id is not None),
    )


def entries(metadata: Mapping[str, Any], name: str, kind: type, *, hint: str = "convert the model again") -> list[Any]:
    """The list `tokenizer.ggml.<name>`, made of *kind* alone.

    Raises:
        ModelError: there is none, or something else is in it.
    """
    key = f"tokenizer.ggml.{name}"
    found = metadata.get(key)
    if found is None:
        raise ModelError(f"a GGUF file must hold {key}, found none; {hint}")
    if not isinstance(found, list) or not all(type(entry) is kind for entry in found):
        raise ModelError(f"{key} must be a list of {kind.__name__}, found something else; {hint}")
    return found


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """The truth of `tokenizer.ggml.<name>`.

    Raises:
        ModelError: it is neither true nor false.
    """
    found = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(found, bool):
        raise ModelError(f"tokenizer.ggml.{name} must be true or false, found {found!r:.100}")
    return found


def add_tokens(engine: Tokenizer, lists: Lists, spelled: list[str]) -> None:
    """Have *engine* find control tokens and user-defined ones in a text, where *spelled* is how it reads each id."""
    ids = range(len(spelled))
    special = [AddedToken(spelled[id], normalized=False) for id in ids if lists.is_special(id)]
    plain = [AddedToken(spelled[id], normalized=False) for id in ids if lists.types[id] == USER_DEFINED]
    engine.add_special_tokens(special)
    engine.add_tokens(plain)


def _check_lengths(tokens: list[str]) -> None:
    if not tokens:
        raise ModelError("tokenizer.ggml.tokens must hold tokens, found an empty list; convert the model again")
    longest = max(tokens, key=len)
    if len(longest) > MAX_TOKEN_LENGTH:
        raise ModelError(
            f"a token must have at most {MAX_TOKEN_LENGTH} characters, found {len(longest)} in tokenizer.ggml.tokens, "
            f"beginning with {longest[:20]!r}"
        )
