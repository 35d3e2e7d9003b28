"""The accepted length that training reports is the one an engine would count: tokens by rounds."""

import numpy as np
import pytest
import torch

from speculative.training.acceptance import HeadAcceptance, summary

LENGTHS = (12, 1, 7)  # targets of three answers; the second leaves no room for drafts behind the first


def walk(hits: np.ndarray) -> int:
    """Rounds to the end of an answer; hits: [J, n] whether step j's draft of target i is accepted."""
    num_steps, num_targets = hits.shape
    at = rounds = 0
    while at < num_targets:
        accepted = 0
        while accepted < num_steps and at + accepted < num_targets and hits[accepted, at + accepted]:
            accepted += 1
        at += accepted + 1
        rounds += 1
    return rounds


def judged(chances: np.ndarray, temperatures: tuple[float, ...]) -> HeadAcceptance:
    values = torch.from_numpy(chances).float()
    return HeadAcceptance(
        acceptance=values,
        ratio=values,
        hit=values,
        depths=torch.cat([torch.arange(length) for length in LENGTHS]),
        temperatures=torch.cat([torch.full((n,), t) for n, t in zip(LENGTHS, temperatures, strict=True)]),
    )


@pytest.mark.parametrize("num_steps", [1, 3])
def test_greedy_rounds_are_walked(num_steps: int) -> None:
    hits = np.random.default_rng(1).random((num_steps, sum(LENGTHS))) < 0.6
    parts = np.split(hits, np.cumsum(LENGTHS)[:-1], axis=1)
    found = summary([judged(hits.astype(float), (0.0, 0.0, 0.0))])
    assert found.length_t0 == pytest.approx(sum(LENGTHS) / sum(walk(part) for part in parts))


def test_sampled_rounds_are_the_mean_of_those_that_are_walked() -> None:
    rng = np.random.default_rng(2)
    chances = rng.random((3, sum(LENGTHS)))
    found = summary([judged(chances, (1.0, 1.0, 0.0))])
    drawn = [rng.random((3, LENGTHS[0])) < chances[:, : LENGTHS[0]] for _ in range(20_000)]
    rounds = np.array([walk(hits) for hits in drawn]) + 1  # and the answer of one token
    expected = (LENGTHS[0] + LENGTHS[1]) / rounds.mean()
    assert found.length_t1 == pytest.approx(expected, rel=5 * rounds.std() / rounds.mean() / len(rounds) ** 0.5)
