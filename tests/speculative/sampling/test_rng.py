"""Random numbers: the published Philox vectors, an open interval, and streams that know nothing of each other."""

import numpy as np
import pytest
import torch

from speculative.kernels.bindings import Kernels
from speculative.kernels.library import cpu_kernels
from speculative.sampling import rng
from speculative.sampling.rng import Purpose, gumbel, uniforms
from tests.support.distributions import assert_follows
from tests.support.vocabulary import needs_kernels

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
NUM_DRAWS = 1 << 16
KERNELS = cpu_kernels()


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], np.uint64) for word in text.split())


def u64(values: object) -> np.ndarray:
    return np.asarray(values, np.uint64)


def stream(
    seed: object = 7,
    first_round: int = 100,
    offset: int = 0,
    purpose: Purpose = Purpose.COIN,
    kernels: Kernels | None = None,
) -> np.ndarray:
    """Uniforms of consecutive rounds."""
    rounds = np.arange(first_round, first_round + NUM_DRAWS, dtype=np.uint64)
    shape = np.zeros(NUM_DRAWS, np.uint64)
    return uniforms(shape + u64(seed), rounds, shape + u64(offset), shape + u64(purpose), kernels=kernels)


def pair_counts(first: np.ndarray, second: np.ndarray, bins: int = 16) -> np.ndarray:
    cells = (first * bins).astype(int) * bins + (second * bins).astype(int)
    return np.bincount(cells, minlength=bins * bins)


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
    noise = rng.noise_uniforms(torch.from_numpy(seeds.copy()), torch.from_numpy(positions), 34, kernels)
    for row, (seed, position) in zip(noise.tolist(), names[:20, :2].tolist(), strict=True):
        pairs = [published(seed, pair, position, Purpose.NOISE) for pair in range(17)]
        assert row == [of_52_bits(*half) for words in pairs for half in (words[:2], words[2:])]


@pytest.mark.parametrize(("word", "value"), [(0, 2.0**-53), (0xFFFFFFFF, 1 - 2.0**-53)])
def test_the_interval_is_open(monkeypatch: pytest.MonkeyPatch, word: int, value: float) -> None:
    """A coin of 0 would accept a token of probability 0; a uniform of 1 would fall off the end of the distribution."""
    monkeypatch.setattr(rng, "_philox", lambda *_: (u64([word]),) * 4)
    drawn = uniforms(*(u64([1]) for _ in range(4)))
    assert drawn.dtype == np.float64
    assert 0 < drawn[0] < 1
    assert drawn[0] == value


def test_what_is_rare_happens_as_often_as_it_should() -> None:
    """Numbers of 16 bits are never below 2**-17: tokens of that chance would never come."""
    rounds = np.arange(1 << 22, dtype=np.uint64)
    drawn = uniforms(np.full_like(rounds, 7), rounds, np.zeros_like(rounds), np.zeros_like(rounds))
    for chance in (2.0**-17, 2.0**-19):
        assert abs((drawn < chance).sum() - len(drawn) * chance) < 5 * (len(drawn) * chance) ** 0.5
        assert abs((drawn > 1 - chance).sum() - len(drawn) * chance) < 5 * (len(drawn) * chance) ** 0.5
    assert (drawn < 2.0**-19).any()


@pytest.mark.parametrize(
    "other",
    [
        *({"purpose": purpose} for purpose in Purpose if purpose is not Purpose.COIN),
        {"offset": 1},
        {"offset": 2},
        {"first_round": 101},  # the same stream one round on: neighbouring rounds
        {"first_round": 104},
        {"seed": 8},
        {"seed": 7 + 2**32},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_streams_are_independent(other: dict[str, int]) -> None:
    """Two uniforms that differ in any one part of their names have nothing to do with each other."""
    first, second = stream(), stream(**other)  # type: ignore[arg-type]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / NUM_DRAWS**0.5
    assert_follows(pair_counts(first, second), np.full(256, 1 / 256))
    assert len(np.intersect1d(first, second)) == (
        0 if "first_round" not in other else NUM_DRAWS - other["first_round"] + 100
    )


def test_consecutive_seeds_give_a_uniform_first_draw() -> None:
    """Clients number their requests: what seeds 0, 1, 2, ... draw first must be uniform over the requests."""
    name = (np.full(NUM_DRAWS, value, np.uint64) for value in (12, 0, Purpose.BONUS))
    first = uniforms(np.arange(NUM_DRAWS, dtype=np.uint64), *name)
    assert_follows(np.bincount((first * 256).astype(int), minlength=256), np.full(256, 1 / 256))
    assert_follows(pair_counts(first[:-1], first[1:]), np.full(256, 1 / 256))


@needs_kernels
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 4097])
def test_the_kernel_makes_the_same_noise_bit_for_bit(size: int) -> None:
    seeds, positions = torch.tensor([0, -1, 2**62 + 17]), torch.tensor([0, 7, 2**32 - 1])
    ours = gumbel(seeds, positions, size, KERNELS)
    assert torch.equal(ours, gumbel(seeds, positions, size))
