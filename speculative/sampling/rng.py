"""Random numbers that are a function of their use, not of when they are drawn.

Every uniform is named by (request seed, round, offset in the round, purpose) through Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011). The round is the number of tokens at its start: it is unique, and
still known after a handoff, a preemption or a resume, so the seed is all that has to travel.

A uniform is (k + 1/2) / 2**52 with 52 random bits k: a probability of acceptance is followed to within 2**-53 of 0 and
of 1, and neither 0 nor 1 ever comes. Float32 would end at 2**-24, and lose tokens that are less likely.

The uniforms are generated on the host for all rows of a step at once, so the CPU and the GPU share them. The coupled
verifier's Gumbel noise, one number per token of the vocabulary, is generated where the probabilities are, by the same
integer arithmetic, and is keyed by (request seed, position) alone.
"""

import enum
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels

Uint64s = np.ndarray[Any, np.dtype[np.uint64]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]
Words = Any  # 32-bit words, in uint64 arrays or int64 tensors

RESOLUTION = 2.0**-52
"""Distance of neighbouring uniforms; each lies in the middle between two multiples of it."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_ROWS_KEPT = 64  # of noise; 400 KB each for a vocabulary of 50,000


class Purpose(enum.IntEnum):
    """The purpose of a random number. Two purposes never share one: a shared draw biases the output."""

    DRAFT = 0
    COIN = 1
    RESIDUAL = 2
    BONUS = 3
    NOISE = 4


def uniforms(
    seeds: Uint64s, rounds: Uint64s, offsets: Uint64s, purposes: Uint64s, *, kernels: Kernels | None = None
) -> Float64s:
    """One uniform in the open interval (0, 1) per row, with 52 random bits: from 2**-53 to 1 - 2**-53.

    Args:
        seeds: [R] uint64, the request's seed.
        rounds: [R] number of tokens at the start of the round, < 2**32.
        offsets: [R] position in the round, < 2**32.
        purposes: [R] values of `Purpose`.
        kernels: that compute them; None = numpy, with the same bits.

    Returns:
        [R] float64; never 0 (a coin of 0 would accept a token of probability 0) and never 1.
    """
    if kernels is not None:
        return kernels.uniforms(*map(np.ascontiguousarray, (seeds, rounds, offsets, purposes)))
    words = _philox((rounds, offsets, purposes, np.zeros_like(rounds)), _key(seeds))
    drawn: Float64s = (_bits(words[0], words[1]) + 0.5) * RESOLUTION
    return drawn


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, kernels: Kernels | None = None) -> Tensor:
    """Gumbel noise for every token of the vocabulary: argmax(log p + noise) is a draw from p.

    Args:
        seeds: [R] int64, the request's seed as two's complement.
        positions: [R] int64, the position of the token that is drawn, < 2**32.
        vocab_size: tokens.
        kernels: that compute the uniforms of a CPU; None = torch, with the same bits.

    Returns:
        [R, vocab_size] float64, finite; a function of (seed, position, token) alone.
    """
    if seeds.device.type == "cpu" and 0 < len(seeds) <= _ROWS_KEPT:
        where = zip(seeds.tolist(), positions.tolist(), strict=True)
        return torch.stack([_gumbel_row(seed, position, vocab_size, kernels) for seed, position in where])
    return _make_gumbel(seeds, positions, vocab_size, kernels)


@functools.lru_cache(maxsize=_ROWS_KEPT)
def _gumbel_row(seed: int, position: int, vocab_size: int, kernels: Kernels | None) -> Tensor:
    """[vocab_size] of `gumbel` on a CPU, read-only.

    Cached, because a position is first drafted and then judged, and again after a rejection before it.
    """
    return _make_gumbel(torch.tensor([seed]), torch.tensor([position]), vocab_size, kernels)[0]


def _make_gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, kernels: Kernels | None) -> Tensor:
    return -(-noise_uniforms(seeds, positions, vocab_size, kernels).log()).log()


def noise_uniforms(seeds: Tensor, positions: Tensor, vocab_size: int, kernels: Kernels | None = None) -> Tensor:
    """[R, vocab_size] float64 in (0, 1): the uniforms behind `gumbel`."""
    if kernels is not None and seeds.device.type == "cpu":
        return kernels.noise(seeds, positions, vocab_size)
    pairs = torch.arange((vocab_size + 1) // 2, device=seeds.device).expand(seeds.shape[0], -1)
    purpose = torch.full_like(pairs, Purpose.NOISE)
    low, high = _key(seeds[:, None].expand_as(pairs))
    words = _philox((pairs, positions[:, None].expand_as(pairs), purpose, torch.zeros_like(pairs)), (low, high))
    bits = torch.stack((_bits(words[0], words[1]), _bits(words[2], words[3])), dim=-1)  # two tokens a call
    return (bits.reshape(seeds.shape[0], -1)[:, :vocab_size].double() + 0.5) * RESOLUTION


def _key(seeds: Words) -> tuple[Words, Words]:
    return seeds & _MASK, (seeds >> 32) & _MASK


def _bits(first: Words, second: Words) -> Words:
    """52 bits of two words: as many as a float64 holds along with the half that keeps them off 0 and 1."""
    return ((first >> 6) << 26) + (second >> 6)


def _philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 64 bits; signed tensors wrap around
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
