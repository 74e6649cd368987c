import resource

import torch

from headrace.core.kv.store import KVStore


def store(num_blocks: int) -> KVStore:
    return KVStore(num_blocks=num_blocks, num_layers=3, num_kv_heads=2, block_size=16, head_dim=4)


def test_the_null_block_holds_zeros():
    assert not store(4).pool[0].any()


def test_a_layer_is_a_view_of_the_pool():
    pool = store(4)

    pool.layer(1)[2, 0, 1, 15, 3] = 5.0

    assert pool.layer(1).shape == (4, 2, 2, 16, 4)
    assert pool.pool[2, 1, 0, 1, 15, 3] == 5.0


def test_copies_are_made_one_after_the_other():
    pool = store(5)
    pool.pool[:] = torch.arange(5.0).view(5, 1, 1, 1, 1, 1)

    pool.copy([(1, 2), (2, 3)])

    assert pool.pool[:, 2, 1, 1, 15, 3].tolist() == [0, 1, 1, 1, 4]


def test_memory_is_touched_only_where_it_is_written():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    pool = store(1 << 17)

    allocated_kib = pool.pool.nbytes >> 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < allocated_kib / 10
