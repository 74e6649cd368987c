"""Who holds which block of the KV cache, and which blocks can be found again by what is in them.

Plain Python: block ids in, block ids out. It knows neither tensors nor tokens nor requests; a block's content is a
digest that the caller computed (`prefix`). Every call takes time proportional to the blocks named in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

NULL_BLOCK: Final = 0
"""Pads block tables. Never handed out, and nothing read from it means anything."""


class NoBlocks(LookupError):
    """Fewer blocks are free than were asked for; none was taken."""


class BlockPool:
    """Blocks 1 … *num_blocks*, each held by as many owners as its reference count says; at zero it is free.

    A published block stays findable while it is free, until it is reused. Blocks are reused in this order: first those
    nobody can find, the last freed first, so that memory once touched is used again; then published ones, the least
    recently used first and within one table its tail first, for a prefix serves more requests than what follows it.
    Only where those are needed, blocks whose memory the system has not given yet.

    Args:
        num_ready: blocks below the number that it returns can be written at once, the others must wait for the system;
            may grow at any time. None: all can.

    Attributes:
        num_blocks: usable blocks; the tensors behind need one more, for the null block.
        block_size: tokens a block.
        num_evictions: published blocks reused for something else, so far.
    """

    def __init__(self, num_blocks: int, block_size: int, num_ready: Callable[[], int] | None = None) -> None:
        assert num_blocks > 0, f"a pool needs at least 1 block, got {num_blocks}"
        assert block_size > 0, f"a block needs at least 1 token, got {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._num_ready = num_ready or (lambda: num_blocks + 1)
        self._num_free = num_blocks
        # From this one on none was ever allocated. They are in the free list one after the other, and what can be found
        # comes after them.
        self._fresh = 1
        self._refcounts = [0] * (num_blocks + 1)
        self._digests: list[bytes | None] = [None] * (num_blocks + 1)
        self._published: dict[bytes, int] = {}
        # The free list is a ring through these two; the null block is its anchor, after which reuse begins.
        self._next = [*range(1, num_blocks + 1), NULL_BLOCK]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those findable but held by nobody included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks held by somebody."""
        return self.num_blocks - self._num_free

    @property
    def num_published(self) -> int:
        """Blocks that can be found, held or free."""
        return len(self._published)

    def num_free_without(self, blocks: Iterable[int]) -> int:
        """What `num_free` will be once these (distinct) blocks are shared: a found block that is free counts once."""
        return self._num_free - sum(not self.refcount(block) for block in blocks)

    def refcount(self, block: int) -> int:
        """How many owners hold *block*."""
        self._expect_own(block)
        return self._refcounts[block]

    def allocate(self, count: int) -> list[int]:
        """Take *count* free blocks, each with a reference count of 1 and no digest.

        Raises:
            NoBlocks: fewer are free; nothing was taken.
        """
        assert count >= 0, f"count must be >= 0, got {count}"
        if count > self._num_free:
            raise NoBlocks(f"{count} blocks wanted, {self._num_free} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            if block >= self._fresh:
                if block >= self._num_ready() and (published := self._next[self.num_blocks]) != NULL_BLOCK:
                    block = published
                else:
                    self._fresh = block + 1
            self._hold(block)
            if self._unpublish(block):
                self.num_evictions += 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block, free or held."""
        for block in blocks:
            if self.refcount(block):
                self._refcounts[block] += 1
            else:
                self._hold(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Take an owner from each block. Give them in the order of their table."""
        for block in reversed(blocks):
            assert self.refcount(block), f"block {block} is freed more often than it is held"
            self._refcounts[block] -= 1
            if not self._refcounts[block]:
                self._release(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Let the held *block* be found under *digest*. If another block already can, that one stays the one found."""
        assert self.refcount(block), f"block {block} is published but held by nobody"
        assert self._digests[block] in (None, digest), f"block {block} is published under two digests"
        if self._published.setdefault(digest, block) == block:
            self._digests[block] = digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest findable run from the start of a chain. They are not held yet: `share` them."""
        blocks = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, for what is in them is not to be trusted. Their owners keep them."""
        for block in blocks:
            self._expect_own(block)
            if self._unpublish(block) and not self._refcounts[block]:
                self._unlink(block)
                self._link(NULL_BLOCK, block)

    def check(self) -> None:
        """Walk everything; for tests.

        Raises:
            AssertionError: the books disagree.
        """
        free: list[int] = []
        block = NULL_BLOCK
        while (block := self._next[block]) != NULL_BLOCK and len(free) <= self.num_blocks:
            assert self._next[self._previous[block]] == block, f"the free list is torn at block {block}"
            free.append(block)
        assert self._previous[NULL_BLOCK] == (free[-1] if free else NULL_BLOCK), "the free list is torn at its end"
        assert len(free) == self._num_free, f"{len(free)} blocks are listed as free, {self._num_free} counted"
        unreferenced = [block for block in range(1, self.num_blocks + 1) if self._refcounts[block] == 0]
        assert sorted(free) == unreferenced, "the free list and the reference counts disagree"
        assert min(self._refcounts) >= 0, "a block is held by less than nobody"
        assert self._refcounts[NULL_BLOCK] == 0, "the null block is held"
        digests = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert digests == self._published, "blocks and published digests disagree"
        findable = [self._digests[block] is not None for block in free]
        assert findable == sorted(findable), "a findable block is reused before one that nobody can find"
        fresh = [block for block in free if block >= self._fresh]
        assert fresh == [*range(self._fresh, self.num_blocks + 1)], "blocks that were never allocated are out of order"

    def _expect_own(self, block: int) -> None:
        # The null block is the anchor of the free list, and a negative id would name a block from the end.
        assert 0 < block <= self.num_blocks, f"block must be 1 … {self.num_blocks}, got {block}"

    def _hold(self, block: int) -> None:
        """Free → held by one."""
        self._unlink(block)
        self._num_free -= 1
        self._refcounts[block] = 1

    def _release(self, block: int) -> None:
        """Held by none → free: at the end of the list where somebody may find it, at its start where nobody can."""
        self._link(NULL_BLOCK if self._digests[block] is None else self._previous[NULL_BLOCK], block)
        self._num_free += 1

    def _unpublish(self, block: int) -> bool:
        digest = self._digests[block]
        if digest is None:
            return False
        self._digests[block] = None
        del self._published[digest]
        return True

    def _link(self, after: int, block: int) -> None:
        before = self._next[after]
        self._previous[block], self._next[block] = after, before
        self._next[after] = self._previous[before] = block

    def _unlink(self, block: int) -> None:
        previous, next_ = self._previous[block], self._next[block]
        self._next[previous], self._previous[next_] = next_, previous
