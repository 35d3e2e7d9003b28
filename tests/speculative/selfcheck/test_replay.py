"""What a replay can tell: drift beyond the noise, and tokens that do not follow the law."""

import math
from dataclasses import replace

import numpy as np
import pytest

from speculative.request import SURPRISAL_CLIP_NATS, LawRow
from speculative.selfcheck.replay import DriftTest, LawTest


def rows(law: np.ndarray, tokens: np.ndarray) -> list[LawRow]:
    surprisals = np.minimum(-np.log(law), SURPRISAL_CLIP_NATS)
    return [
        LawRow(
            probability=law[token],
            expected_probability=float((law**2).sum()),
            surprisal=surprisals[token],
            expected_surprisal=float((law * surprisals).sum()),
            gap=float(np.log(law.max() / law[token])),
            outside=0.0,
        )
        for token in tokens
    ]


LAW = np.random.default_rng(0).dirichlet(np.full(50, 0.3)) + 1e-12
LAW /= LAW.sum()


def test_tokens_of_the_law_raise_no_alarm() -> None:
    test = LawTest()
    test.add(rows(LAW, np.random.default_rng(1).choice(50, 50_000, p=LAW)), greedy=False)
    assert test.alarm is None
    assert abs(test.mean_probability) < 0.01


def test_garbage_tokens_are_found_at_once() -> None:
    test = LawTest()
    test.add(rows(LAW, np.random.default_rng(1).choice(50, 200)), greedy=False)
    assert test.alarm in ("probability", "surprisal")


def test_a_tolerance_is_no_alarm() -> None:
    warmer = LAW**0.97
    warmer /= warmer.sum()
    tokens = np.random.default_rng(1).choice(50, 100_000, p=warmer)
    strict, tolerant = LawTest(), LawTest(tolerance=0.02)
    strict.add(rows(LAW, tokens), greedy=False)
    tolerant.add(rows(LAW, tokens), greedy=False)
    assert strict.alarm is not None
    assert tolerant.alarm is None


def test_one_forbidden_token_is_enough_and_rounding_at_an_edge_is_not() -> None:
    (row,) = rows(LAW, np.array([3]))
    test = LawTest(edge_nats=0.01)
    test.add([replace(row, outside=0.005)] * 100, greedy=False)
    assert test.alarm is None
    test.add([replace(row, outside=math.inf)], greedy=False)
    assert test.alarm == "support"


def test_greedy_tokens_are_the_likeliest() -> None:
    best, other = rows(LAW, np.array([LAW.argmax(), LAW.argmin()]))
    test = LawTest()
    test.add([best] * 5000, greedy=True)
    assert test.alarm is None
    test.add([other] * 12, greedy=True)
    assert test.alarm == "greedy"


def test_drift_within_the_measured_noise_is_no_alarm() -> None:
    noise = np.random.default_rng(5).exponential(0.01, 20_000)  # beyond 0.07: one in a thousand
    test = DriftTest(limit_nats=0.07, rate=1e-3)
    test.add(noise.tolist())
    assert not test.alarm
    assert test.num == 20_000
    assert 10 < test.num_over < 40


@pytest.mark.parametrize("drift", [0.5, math.inf, math.nan])
def test_a_few_tokens_that_drift_are_found(drift: float) -> None:
    test = DriftTest(limit_nats=0.07, rate=1e-3)
    test.add([0.001] * 10 + [drift] * 4)
    assert test.alarm
