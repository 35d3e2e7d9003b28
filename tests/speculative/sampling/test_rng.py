"""Random numbers: those of the published algorithm, each part of their names in its place, in an open interval."""

import numpy as np
import pytest
import torch

from speculative.kernels.bindings import Kernels
from speculative.kernels.library import cpu_kernels
from speculative.sampling import rng
from speculative.sampling.rng import Purpose, uniforms
from tests.support.vocabulary import needs_kernels

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
KERNELS = cpu_kernels()


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], np.uint64) for word in text.split())


def u64(values: object) -> np.ndarray:
    return np.asarray(values, np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    assert [int(word[0]) for word in rng._philox(words(counter), words(key))] == [int(x, 16) for x in result.split()]


def published(seed: int, *counter: int) -> list[int]:
    """The four words of Philox4x32-10 (Salmon et al., 2011), in whole numbers of any size."""
    words, keys = [*counter, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [second >> 32 ^ words[1] ^ keys[0], second % 2**32, first >> 32 ^ words[3] ^ keys[1], first % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return words


by_each = pytest.mark.parametrize(
    "kernels", [pytest.param(None, id="torch"), pytest.param(KERNELS, marks=needs_kernels, id="kernels")]
)


def of_52_bits(high: int, low: int) -> float:
    return ((high >> 6 << 26) + (low >> 6) + 0.5) / 2**52


@by_each
def test_random_numbers_are_those_of_the_published_algorithm_bit_by_bit(kernels: Kernels | None) -> None:
    """Triton's show in what coupled rows choose: `test_row_drafts.py`, `test_step_conformance.py`."""
    names = np.random.default_rng(1).integers(0, [2**64 - 1, 2**32, 2**32, 5], (200, 4), np.uint64, endpoint=False)
    expected = [of_52_bits(*published(*name)[:2]) for name in names.tolist()]
    assert uniforms(*names.T, kernels=kernels).tolist() == expected
    seeds, positions = names[:20, 0].view(np.int64), names[:20, 1].astype(np.int64)
    for size in (1, 33, 130):
        noise = rng.noise_uniforms(torch.from_numpy(seeds.copy()), torch.from_numpy(positions), size, kernels)
        for row, (seed, position) in zip(noise.tolist(), names[:20, :2].tolist(), strict=True):
            pairs = [published(seed, pair, position, Purpose.NOISE) for pair in range((size + 1) // 2)]
            assert row == [of_52_bits(*half) for words in pairs for half in (words[:2], words[2:])][:size]


@pytest.mark.parametrize(("word", "value"), [(0, 2.0**-53), (0xFFFFFFFF, 1 - 2.0**-53)])
def test_the_interval_is_open(monkeypatch: pytest.MonkeyPatch, word: int, value: float) -> None:
    """A coin of 0 would accept a token of probability 0; a uniform of 1 would fall off the end of the distribution."""
    monkeypatch.setattr(rng, "_philox", lambda *_: (u64([word]),) * 4)
    drawn = uniforms(*(u64([1]) for _ in range(4)))
    assert drawn.dtype == np.float64
    assert 0 < drawn[0] < 1
    assert drawn[0] == value
