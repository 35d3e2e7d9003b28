"""Random numbers that are a function of what they are for, not of when they are drawn.

Every uniform is named by (request seed, round, offset in the round, purpose) through Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011). The round is the number of tokens at its start: it is unique, and
can be told after a handoff, a preemption or a resume, so nothing about randomness travels but the seed.

The uniforms are made on the host for all rows of a step at once, so the CPU and the GPU share them.
"""

import enum
from typing import Any

import numpy as np

Uint64s = np.ndarray[Any, np.dtype[np.uint64]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10


class Purpose(enum.IntEnum):
    """What a uniform decides. Two purposes never share one: a shared draw biases the output."""

    DRAFT = 0
    COIN = 1
    RESIDUAL = 2
    BONUS = 3


def uniforms(seeds: Uint64s, rounds: Uint64s, offsets: Uint64s, purposes: Uint64s) -> Float64s:
    """One uniform in the open interval (0, 1) per row, with 52 random bits.

    Args:
        seeds: [R] uint64, the request's seed.
        rounds: [R] number of tokens at the start of the round, < 2**32.
        offsets: [R] position in the round, < 2**32.
        purposes: [R] values of `Purpose`.

    Returns:
        [R] float64; never 0 (a coin of 0 would accept a token of probability 0) and never 1.
    """
    words = _philox((rounds, offsets, purposes, np.zeros_like(rounds)), (seeds & _MASK, seeds >> _SHIFT))
    high, low = words[0] >> np.uint64(6), words[1] >> np.uint64(6)  # 26 bits each
    return ((high << np.uint64(26)) + low + 0.5) * 2.0**-52


def _philox(counter: tuple[Uint64s, ...], key: tuple[Uint64s, Uint64s]) -> tuple[Uint64s, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
