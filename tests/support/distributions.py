"""Does a sample follow a distribution? Chi-square with a threshold of five sigma."""

import numpy as np
from numpy.typing import ArrayLike

_LEAST_EXPECTED = 5.0  # below it a cell's count is far from normal


def chi_square(observed: ArrayLike, distribution: ArrayLike) -> tuple[float, float]:
    """Statistic and five-sigma threshold of counts [n] against probabilities [n]; rare cells are taken together.

    Source of the threshold: Wilson and Hilferty, "The distribution of chi-square" (1931).
    """
    observed, distribution = np.asarray(observed, float), np.asarray(distribution, float)
    expected = distribution / distribution.sum() * observed.sum()
    if observed[distribution == 0].sum() > 0:
        return float("inf"), 0.0
    rare = expected < _LEAST_EXPECTED
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    cells = expected > 0
    statistic = float(((observed - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = max(int(cells.sum()) - 1, 1)
    threshold = freedom * (1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic, threshold


def assert_follows(observed: ArrayLike, distribution: ArrayLike) -> None:
    """The counts are what the distribution would give."""
    statistic, threshold = chi_square(observed, distribution)
    assert statistic < threshold, f"chi-square {statistic:.1f} against a five-sigma threshold of {threshold:.1f}"


def assert_departs(observed: ArrayLike, distribution: ArrayLike) -> None:
    """The counts are not what the distribution would give: for negative controls."""
    statistic, threshold = chi_square(observed, distribution)
    assert statistic > threshold, f"chi-square {statistic:.1f} stays under the five-sigma threshold of {threshold:.1f}"
