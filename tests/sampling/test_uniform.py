import numpy as np
import pytest

from headrace.core.uniform import philox, uniform, uniforms

# The vectors published with Random123: counter, key, block.
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
SEEDS = [0, 1, -1, -(2**63), 2**63 - 1, 2**64 - 1]


def words(numbers):
    return tuple(np.array([number], dtype=np.uint64) for number in numbers)


@pytest.mark.parametrize(("counter", "key", "block"), VECTORS)
def test_philox_gives_the_published_blocks(counter, key, block):
    assert [int(word[0]) for word in philox(words(counter), words(key))] == block


@pytest.mark.parametrize("seed", SEEDS)
def test_any_64_bit_seed_gives_numbers_from_0_to_under_1(seed):
    numbers = uniforms([seed] * 1000, [0] * 1000, range(1000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(set(numbers.tolist())) == 1000


def test_a_batch_gives_each_row_what_it_gets_alone():
    seeds, choices, positions = [5, -5, 2**64 - 1], [0, 3, 127], [0, 2**33, 7]
    alone = [uniform(*key) for key in zip(seeds, choices, positions, strict=True)]
    assert uniforms(seeds, choices, positions).tolist() == alone


def test_seed_choice_and_position_each_change_the_number():
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 2**32), (2**32 + 1, 0, 0)]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_the_upper_words_of_the_block_make_the_number():
    block = VECTORS[0][2]
    assert uniform(0, 0, 0) == ((block[0] << 32 | block[1]) >> 11) / 2**53


def test_numbers_are_spread_evenly():
    numbers = uniforms(list(range(2000)) * 10, [0] * 20000, np.repeat(range(10), 2000))
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # Chi-square with 19 degrees of freedom exceeds 43.8 once in a thousand times; the numbers never change.
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
