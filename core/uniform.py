"""Random numbers without a generator: each is a pure function of (seed, choice, position).

Nothing is kept between draws, so a draw is the same alone or in a batch, before or after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""Numbers of 32 bits, in 64 so that products fit."""

_HALF = np.uint64(32)
_MASK = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10, one block for each element of the arrays.

    Source: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], stream: int = 0
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, choice, position), multiples of 2**-53.

    Args:
        seeds: counted modulo 2**64, so that -1 and 2**64 - 1 are the same seed. They are Philox's key.
        choices: from 0, under 2**32. With the position they are Philox's counter.
        positions: tokens drawn before this one, from 0, under 2**64.
        stream: which of the independent numbers of a draw, under 2**32; 0 is the sampler's. Part of the counter too.
    """
    seed = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    choice = np.array(choices, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = (position & _MASK, position >> _HALF, choice, np.full_like(choice, stream))
    high, low, _, _ = philox(counter, (seed & _MASK, seed >> _HALF))
    return ((high << _HALF | low) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(seed: int, choice: int, position: int) -> float:
    """The number that draws token *position* of *choice*; see `uniforms`."""
    return float(uniforms([seed], [choice], [position])[0])
