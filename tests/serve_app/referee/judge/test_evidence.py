"""What a replay can tell: drift beyond the noise, and tokens that do not follow the distribution."""

import math
from dataclasses import replace

import numpy as np
import pytest

from serve_app.referee.judge.evidence import CalibrationTest, RareTest, UnlikelyTest
from speculative.request import SURPRISAL_CLIP_NATS, ReplayedToken


def rows(distribution: np.ndarray, tokens: np.ndarray) -> list[ReplayedToken]:
    surprisals = np.minimum(-np.log(distribution), SURPRISAL_CLIP_NATS)
    return [
        ReplayedToken(
            probability=distribution[token],
            expected_probability=float((distribution**2).sum()),
            surprisal=surprisals[token],
            expected_surprisal=float((distribution * surprisals).sum()),
            gap=float(np.log(distribution.max() / distribution[token])),
            outside=0.0,
        )
        for token in tokens
    ]


DISTRIBUTION = np.random.default_rng(0).dirichlet(np.full(50, 0.3)) + 1e-12
DISTRIBUTION /= DISTRIBUTION.sum()


def test_tokens_of_the_distribution_raise_no_alarm() -> None:
    test = CalibrationTest()
    test.add(rows(DISTRIBUTION, np.random.default_rng(1).choice(50, 50_000, p=DISTRIBUTION)), greedy=False)
    assert test.alarm is None


def test_garbage_tokens_are_found_at_once() -> None:
    test = CalibrationTest()
    test.add(rows(DISTRIBUTION, np.random.default_rng(1).choice(50, 200)), greedy=False)
    assert test.alarm in ("probability", "surprisal")


def test_a_tolerance_is_no_alarm() -> None:
    warmer = DISTRIBUTION**0.97
    warmer /= warmer.sum()
    tokens = np.random.default_rng(1).choice(50, 100_000, p=warmer)
    strict, tolerant = CalibrationTest(), CalibrationTest(tolerance=0.02)
    strict.add(rows(DISTRIBUTION, tokens), greedy=False)
    tolerant.add(rows(DISTRIBUTION, tokens), greedy=False)
    assert strict.alarm is not None
    assert tolerant.alarm is None


def test_one_forbidden_token_is_enough_and_rounding_at_an_edge_is_not() -> None:
    (row,) = rows(DISTRIBUTION, np.array([3]))
    test = CalibrationTest(edge_nats=0.01)
    test.add([replace(row, outside=0.005)] * 100, greedy=False)
    assert test.alarm is None
    test.add([replace(row, outside=math.inf)], greedy=False)
    assert test.alarm == "support"


def test_greedy_tokens_are_the_likeliest() -> None:
    best, other = rows(DISTRIBUTION, np.array([DISTRIBUTION.argmax(), DISTRIBUTION.argmin()]))
    test = CalibrationTest()
    test.add([best] * 5000, greedy=True)
    assert test.alarm is None
    test.add([other] * 12, greedy=True)
    assert test.alarm == "greedy"


def test_what_is_rare_may_happen_as_often_as_is_claimed_and_no_more() -> None:
    noise = np.random.default_rng(5).exponential(0.01, 20_000)  # beyond 0.07: one in a thousand
    test = RareTest(rate=1e-3, delta=1e-6)
    test.add(noise > 0.07)
    assert 10 < (noise > 0.07).sum() < 40, "about as many as the claimed rate allows"
    assert not test.alarm
    test = RareTest(rate=1e-3, delta=1e-6)
    test.add([False] * 10 + [True] * 4)
    assert test.alarm


@pytest.mark.parametrize("probability", [1e-12, 0.0, math.nan])
def test_a_few_tokens_that_are_all_but_excluded_are_found(probability: float) -> None:
    test = UnlikelyTest(edge_nats=0.25, delta=1e-6)
    test.add([0.1] * 100)
    assert not test.alarm
    test.add([0.1] * 10 + [probability] * 4)
    assert test.alarm
