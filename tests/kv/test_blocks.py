import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace.core.kv.blocks import NULL_BLOCK, BlockPool, NoBlocks

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=100, stateful_step_count=40)


def test_accounting_loads_without_torch():
    program = "import sys\nfrom headrace.core.kv import blocks, memory, plan, prefix\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_null_block_is_never_handed_out():
    assert NULL_BLOCK not in BlockPool(8, 16).allocate(8)


def test_asking_for_more_than_is_free_takes_nothing():
    pool = BlockPool(3, 16)
    pool.allocate(1)
    with pytest.raises(NoBlocks, match="3 blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert (pool.refcount(blocks[0]), pool.num_free) == (1, 0)
    pool.free(blocks)
    assert (pool.refcount(blocks[0]), pool.num_free) == (0, 1)


def test_a_free_block_is_found_and_taken_back_from_the_free_list():
    pool = BlockPool(2, 16)
    [block] = pool.allocate(1)
    pool.publish(block, A)
    pool.free([block])
    pool.share(pool.find([A]))
    assert (pool.refcount(block), pool.num_free) == (1, 1)
    assert block not in pool.allocate(1)


def test_the_tail_of_a_table_is_reused_before_its_head():
    pool = BlockPool(3, 16)
    table = pool.allocate(3)
    for block, digest in zip(table, (A, B, C), strict=True):
        pool.publish(block, digest)
    pool.free(table)
    assert pool.allocate(2) == [table[2], table[1]]
    assert pool.find([A, B, C]) == [table[0]]


def test_the_least_recently_freed_prefix_is_reused_first():
    pool = BlockPool(2, 16)
    old, new = pool.allocate(2)
    pool.publish(old, A)
    pool.publish(new, B)
    pool.free([old])
    pool.free([new])
    pool.share([old])
    pool.free([old])
    assert pool.allocate(1) == [new]


def test_blocks_nobody_can_find_are_reused_before_those_somebody_can():
    pool = BlockPool(3, 16)
    first, second, third = pool.allocate(3)
    pool.publish(first, A)
    pool.free([first])
    pool.free([second, third])
    assert pool.allocate(2) == [second, third]
    assert pool.num_evictions == 0


def test_memory_that_is_not_there_yet_is_taken_last():
    ready = 3
    pool = BlockPool(5, 16, lambda: ready)
    table = pool.allocate(2)
    for block, digest in zip(table, (A, B), strict=True):
        pool.publish(block, digest)
    pool.free(table)
    assert pool.allocate(1) == [table[1]]
    ready = 4
    assert pool.allocate(2) == [3, table[0]]
    assert pool.allocate(2) == [4, 5]
    assert pool.num_evictions == 2


def test_reusing_a_published_block_is_an_eviction_and_it_is_not_found_again():
    pool = BlockPool(1, 16)
    [block] = pool.allocate(1)
    pool.publish(block, A)
    pool.free([block])
    assert pool.num_evictions == 0
    pool.allocate(1)
    assert (pool.num_evictions, pool.num_published, pool.find([A])) == (1, 0, [])


def test_find_stops_at_the_first_gap():
    pool = BlockPool(3, 16)
    table = pool.allocate(3)
    for block, digest in zip(table, (A, B, D), strict=True):
        pool.publish(block, digest)
    assert pool.find([A, B, C, D]) == table[:2]


def test_the_first_of_two_blocks_with_the_same_content_is_the_one_found():
    pool = BlockPool(2, 16)
    first, second = pool.allocate(2)
    pool.publish(first, A)
    pool.publish(second, A)
    pool.free([second])
    assert pool.find([A]) == [first]
    assert pool.num_free == 1


def test_a_forgotten_block_is_kept_by_its_owner_and_found_by_nobody():
    pool = BlockPool(1, 16)
    [block] = pool.allocate(1)
    pool.publish(block, A)
    pool.forget([block])
    assert (pool.find([A]), pool.refcount(block)) == ([], 1)


def test_a_found_free_block_is_not_counted_as_room_for_others():
    pool = BlockPool(4, 16)
    held, unheld = pool.allocate(2)
    pool.publish(held, A)
    pool.publish(unheld, B)
    pool.free([unheld])
    assert pool.num_free == 3
    assert pool.num_free_without(pool.find([A, B])) == 2


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.free([1]), "freed more often"),
        (lambda pool: pool.publish(1, A), "held by nobody"),
        (lambda pool: pool.share([NULL_BLOCK]), "block must be 1 … 2, got 0"),
        (lambda pool: pool.refcount(3), "got 3"),
        (lambda pool: pool.forget([-1]), "got -1"),
    ],
)
def test_a_caller_that_lost_count_is_told(misuse, message):
    with pytest.raises(AssertionError, match=message):
        misuse(BlockPool(2, 16))


class Books(RuleBasedStateMachine):
    """A pool beside the plainest books one can keep: tables, a list of free blocks in order of reuse, digests."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.num_ready = 3
        self.pool = BlockPool(self.NUM_BLOCKS, 16, lambda: self.num_ready)
        self.fresh = set(range(1, self.NUM_BLOCKS + 1))
        self.unheld = list(range(1, self.NUM_BLOCKS + 1))
        self.tables: list[list[int]] = []
        self.digests: dict[int, bytes] = {}

    def refcount(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    def release(self, table: list[int]) -> None:
        """Take *table*, which is no longer among the tables, out of the books."""
        for block in reversed(table):
            if self.refcount(block) == 0:
                self.unheld.insert(len(self.unheld) if block in self.digests else 0, block)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        if count > len(self.unheld):
            with pytest.raises(NoBlocks):
                self.pool.allocate(count)
            return
        expected = [self.take() for _ in range(count)]
        assert self.pool.allocate(count) == expected
        self.tables.append(expected)

    def take(self) -> int:
        block = self.unheld[0]
        if block in self.fresh and block >= self.num_ready:
            block = next((other for other in self.unheld if other in self.digests), block)
        self.unheld.remove(block)
        self.fresh.discard(block)
        self.digests.pop(block, None)
        return block

    @rule(more=st.integers(1, 2))
    def make_ready(self, more):
        self.num_ready += more

    @rule(chain=st.lists(st.sampled_from([A, B, C, D]), unique=True))
    def share(self, chain):
        blocks = {digest: block for block, digest in self.digests.items()}
        gap = next((i for i, digest in enumerate(chain) if digest not in blocks), len(chain))
        expected = [blocks[digest] for digest in chain[:gap]]
        assert self.pool.find(chain) == expected
        room = self.pool.num_free_without(expected)
        self.pool.share(expected)
        assert self.pool.num_free == room
        self.unheld = [block for block in self.unheld if block not in expected]
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        self.release(table)

    @precondition(lambda self: any(block not in self.digests for table in self.tables for block in table))
    @rule(data=st.data(), digest=st.sampled_from([A, B, C, D]))
    def publish(self, data, digest):
        held = sorted({block for table in self.tables for block in table if block not in self.digests})
        block = data.draw(st.sampled_from(held))
        self.pool.publish(block, digest)
        if digest not in self.digests.values():
            self.digests[block] = digest

    @rule(block=st.integers(1, NUM_BLOCKS))
    def forget(self, block):
        self.pool.forget([block])
        if self.digests.pop(block, None) and block in self.unheld:
            self.unheld.remove(block)
            self.unheld.insert(0, block)

    @invariant()
    def the_books_agree(self):
        self.pool.check()
        assert self.pool.num_free == len(self.unheld)
        assert self.pool.num_used == self.NUM_BLOCKS - len(self.unheld)
        assert self.pool.num_published == len(self.digests)
        for block in range(1, self.NUM_BLOCKS + 1):
            assert self.pool.refcount(block) == self.refcount(block)

    def teardown(self):
        for table in self.tables:
            self.pool.free(table)
        self.pool.check()
        assert self.pool.num_free == self.NUM_BLOCKS


def test_any_order_of_calls_keeps_the_books_and_leaks_nothing():
    run_state_machine_as_test(Books, settings=PROFILE)


def test_check_notices_a_block_that_was_lost():
    class Leaky(BlockPool):
        def _release(self, block: int) -> None:
            self._num_free += 1

    pool = Leaky(2, 16)
    pool.free(pool.allocate(1))
    with pytest.raises(AssertionError, match="1 blocks are listed as free, 2 counted"):
        pool.check()
