"""Which blocks a prompt need not compute, because another sequence has computed them or is about to.

Every sequence names its full blocks by digests. A block is findable from the step that computes it on; before that, who
will compute it has a claim on its digest, and others wait.
"""

from __future__ import annotations

from ..kv.blocks import BlockPool
from ..kv.prefix import Computing, digests
from .live import Live


class Sharing:
    """The prefixes of all sequences.

    Args:
        enabled: False: nothing is shared.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self._computing: Computing[Live] = Computing()

    def find(self, live: Live) -> list[int]:
        """Blocks that hold the beginning of its tokens. Not held yet."""
        if not self._shares(live):
            return []
        self._extend(live)
        return self._pool.find(live.digests[: self._num_usable(live)])

    def is_on_its_way(self, live: Live, num_found: int) -> bool:
        """Another sequence computes the block after those found: waiting costs less than computing it again."""
        if not self._shares(live) or num_found >= self._num_usable(live):
            return False
        owner = self._computing.owner(live.digests[num_found])
        return owner is not None and owner.plannable

    def claim(self, live: Live, num_found: int) -> None:
        """*live* is going to compute its blocks after those found."""
        live.claims = True
        for digest in live.digests[num_found:]:
            self._computing.claim(digest, live)

    def release(self, live: Live) -> None:
        """It has computed them, or never will."""
        if live.claims:
            live.claims = False
            self._computing.release(live)

    def publish(self, live: Live) -> None:
        """Make its full blocks findable, as far as their ids are known and their step is planned."""
        size = self._pool.block_size
        if not self._enabled or live.num_computed < (live.num_published + 1) * size:
            return
        self._extend(live)
        full = min(live.num_computed, len(live.tokens)) // size
        for index in range(live.num_published, full):
            self._pool.publish(live.blocks[index], live.digests[index])
        live.num_published = max(live.num_published, full)

    def _shares(self, live: Live) -> bool:
        # Who wants the log-probabilities of the prompt has to compute all of it.
        return self._enabled and not live.wants_scores

    def _num_usable(self, live: Live) -> int:
        """Blocks it may take over: one token is left to compute, for its logits are wanted."""
        return (len(live.tokens) - 1) // self._pool.block_size

    def _extend(self, live: Live) -> None:
        """Name the blocks that have filled up."""
        start = len(live.digests) * self._pool.block_size
        if len(live.tokens) - start >= self._pool.block_size:
            parent = live.digests[-1] if live.digests else None
            salt = live.request.tenant
            live.digests += digests(live.tokens, self._pool.block_size, salt=salt, parent=parent, start=start)
