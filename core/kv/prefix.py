"""Names for the content of KV cache blocks: equal digests mean equal tokens after equal tokens, from the start on.

A digest names a full block and, through its parent, all that stands before it, so that the longest known prefix of a
prompt is found by one look-up a block. It knows neither which block holds what (`blocks`) nor requests.

The format, version 1, is the same in every process and on every machine, so that digests may leave the process:

    root     = BLAKE2b-128(salt in UTF-8,                    no key,           person "headrace-kv-1")
    digest 0 = BLAKE2b-128(tokens as little-endian int32,    key root,         person "headrace-kv-1")
    digest i = BLAKE2b-128(tokens as little-endian int32,    key digest i - 1, person "headrace-kv-1")

A change to any of it is a new version and gets a new person string. Who does not know the salt cannot tell which
digests a text has, so two tenants neither share blocks nor learn of each other's by timing.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Final, Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)

DIGEST_BYTES: Final = 16
_PERSON: Final = b"headrace-kv-1"


def root(salt: str = "") -> bytes:
    """The parent of a first block.

    Args:
        salt: whatever separates equal tokens: the tenant, the adapter; the model too, where digests leave the process.
    """
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=_PERSON).digest()


def digests(
    token_ids: Sequence[int], block_size: int, *, salt: str = "", parent: bytes | None = None, start: int = 0
) -> list[bytes]:
    """The digests of the full blocks of `token_ids[start:]`; tokens that fill no block have none.

    Args:
        token_ids: of any length, each within int32.
        salt: see `root`; unused with *parent*, which has it in itself.
        parent: digest of the block that ends at *start*; None: there is none before.
        start: where to begin, in tokens.
    """
    ids = array("i", token_ids[start:])
    assert ids.itemsize == 4, "the format wants 32-bit tokens"
    if sys.byteorder == "big":
        ids.byteswap()
    data = ids.tobytes()
    size = block_size * ids.itemsize
    digest = root(salt) if parent is None else parent
    chain = []
    for end in range(size, len(data) + 1, size):
        digest = blake2b(data[end - size : end], digest_size=DIGEST_BYTES, key=digest, person=_PERSON).digest()
        chain.append(digest)
    return chain


class Computing(Generic[Owner]):
    """Which digests are being computed right now, and by whom, so that a second request waits for the first.

    Owners are compared as dictionary keys are.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, Owner] = {}
        self._claims: dict[Owner, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def claim(self, digest: bytes, owner: Owner) -> bool:
        """*owner* is about to compute *digest*. False, and nothing changes, if somebody else already is."""
        if digest in self._owners:
            return self._owners[digest] == owner
        self._owners[digest] = owner
        self._claims.setdefault(owner, []).append(digest)
        return True

    def release(self, owner: Owner) -> None:
        """*owner* has computed all it claimed, or never will. Without claims: nothing happens."""
        for digest in self._claims.pop(owner, ()):
            del self._owners[digest]

    def owner(self, digest: bytes) -> Owner | None:
        """Who computes *digest*; None: nobody does."""
        return self._owners.get(digest)
