"""The random numbers by which vLLM samples on a CPU, made again.

A request's generator gives one number for each of its tokens. That number and a token id give the token's noise, by
SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014); sampled is the token with the
largest logit + Gumbel noise, of those that top-k and top-p leave. Source: `fused_gumbel_argmax` of vLLM 0.32. Whether a
vLLM does so is tried when it starts (`samples_so`).

Drafts are judged by further numbers of the same generator. Those are not made again here.
"""

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SEED_BITS = 63  # torch's generators take no more
_NUMBERS = 2**31  # what a token's number lies below
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Sampler = Callable[[Tensor, dict[int, torch.Generator], Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
"""Logits [B, V], which it may write over, the generators by row, top_k and top_p to the tokens sampled [B]."""


def generator_seed(seed: int, num_emitted: int) -> int:
    """Seed of the generator that vLLM is to use for a request; it repeats no draw of the tokens emitted elsewhere."""
    digest = blake2b(f"{seed}/{num_emitted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def token_numbers(seed: int, count: int) -> list[int]:
    """The numbers of a request's first `count` tokens; seed: of the request, not of its generator."""
    generator = torch.Generator().manual_seed(generator_seed(seed, 0))
    numbers: list[int] = torch.randint(0, _NUMBERS, (count,), generator=generator).tolist()
    return numbers


def uniforms_of(number: int, vocab_size: int) -> Tensor:
    """[vocab_size] float64 in (0, 1): the noise of token i is -log(-log(u_i))."""
    key = _mixed(np.array([number], np.uint64))
    bits = _mixed(key + np.arange(1, vocab_size + 1, dtype=np.uint64) * _GAMMA) >> np.uint64(11)
    return torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53)


def samples_so(sampler: Sampler) -> bool:
    """Return whether a sampler for CPUs draws in this way: two tokens for each of four seeded requests."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    generators = {row: torch.Generator().manual_seed(generator_seed(row, 0)) for row in range(4)}
    sampled = [sampler(logits.clone(), generators, None, None)[0].tolist() for _ in range(2)]
    numbers = [token_numbers(row, 2) for row in range(4)]
    return sampled == [[_chosen(logits[row], numbers[row][step]) for row in range(4)] for step in range(2)]


def _chosen(logits: Tensor, number: int) -> int:
    return int((logits.double() - (-uniforms_of(number, len(logits)).log()).log()).argmax())


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX[0]
    words = (words ^ (words >> np.uint64(27))) * _MIX[1]
    return words ^ (words >> np.uint64(31))
