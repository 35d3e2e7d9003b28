"""Does a sample follow a distribution? Chi-square with a threshold of five sigma."""

import numpy as np
from numpy.typing import ArrayLike

_LEAST_EXPECTED = 5.0  # below it a cell's count is far from normal


def sigmas(observed: ArrayLike, distribution: ArrayLike) -> float:
    """How many standard deviations the chi-square of counts [n] lies above what probabilities [n] give; rare cells are
    taken together, and a count where the probability is 0 is infinitely far.

    Source of the approximation: Wilson and Hilferty, "The distribution of chi-square" (1931).
    """
    observed, distribution = np.asarray(observed, float), np.asarray(distribution, float)
    expected = distribution / distribution.sum() * observed.sum()
    if observed[distribution == 0].any():
        return float("inf")
    rare = expected < _LEAST_EXPECTED
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    cells = expected > 0
    freedom = max(int(cells.sum()) - 1, 1)
    ratio = ((observed - expected)[cells] ** 2 / expected[cells]).sum() / freedom
    variance = 2 / (9 * freedom)
    return float((ratio ** (1 / 3) - (1 - variance)) / variance**0.5)


def assert_follows(observed: ArrayLike, distribution: ArrayLike) -> None:
    """The counts are what the distribution would give."""
    assert sigmas(observed, distribution) < 5


def assert_departs(observed: ArrayLike, distribution: ArrayLike) -> None:
    """The counts are not what the distribution would give: for negative controls."""
    assert sigmas(observed, distribution) > 5
