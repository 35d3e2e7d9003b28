"""Do texts follow a Markov chain? Samples of an engine whose model is a table, against the table's distribution."""

import numpy as np

from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams


def sample(engine: EngineCore, prompt: tuple[int, ...], count: int, length: int, **params: object) -> np.ndarray:
    """[count, length] tokens of `count` requests with seeds of their own."""
    settings = SamplingParams(max_tokens=length, ignore_eos=True, **params)  # type: ignore[arg-type]
    out: dict[str, list[int]] = {}
    for number in range(count):
        engine.add(Request(str(number), prompt, settings, seed=number * 2654435761 + 1))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
    return np.array([out[str(number)] for number in range(count)])


def worst_window(samples: np.ndarray, distribution: np.ndarray, first: int) -> float:
    """The largest deviation, in standard deviations, of any three neighbouring tokens from the chain's distribution [V,
    V]."""
    marginal = distribution[first]
    worst = -np.inf
    for start in range(samples.shape[1] - 2):
        joint = marginal[:, None, None] * distribution[:, :, None] * distribution[None, :, :]
        worst = max(worst, sigmas(samples[:, start : start + 3], joint))
        marginal = marginal @ distribution
    return float(worst)


def sigmas(samples: np.ndarray, joint: np.ndarray) -> float:
    """How many standard deviations the chi-square of samples [N, length] lies above its mean.

    Cells that expect fewer than 10 are put together.
    """
    vocab_size, length = joint.shape[0], joint.ndim
    index = np.zeros(len(samples), np.int64)
    for position in range(length):
        index = index * vocab_size + samples[:, position]
    observed = np.bincount(index, minlength=joint.size).astype(float)
    expected = joint.reshape(-1) * len(samples)
    rare = expected < 10
    assert not observed[expected == 0].any(), "a token of probability 0 was emitted"
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    chi_square = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    return float((chi_square - freedom) / np.sqrt(2 * freedom))
