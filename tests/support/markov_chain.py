"""Do texts follow a Markov chain? Samples of an engine whose model is a table, against the table's distribution."""

import numpy as np

from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from tests.support import distributions


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
    """How far samples [N, length] are from a joint distribution."""
    counts = np.bincount(np.ravel_multi_index(tuple(samples.T), joint.shape), minlength=joint.size)
    return distributions.sigmas(counts, joint.reshape(-1))
