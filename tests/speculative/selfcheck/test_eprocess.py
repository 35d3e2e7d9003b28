"""E-processes: fair games stay poor, faults make them rich, and restarts cost what they should."""

import math

import numpy as np
import pytest

from speculative.selfcheck.eprocess import STAKES, EProcess, FreshStarts, log_wealth


def products(values: np.ndarray) -> np.ndarray:
    return np.log1p(np.array(STAKES) * values[:, None]).sum(axis=0)


def feed(process: FreshStarts, values: np.ndarray, step: int = 64) -> int | None:
    """Where it alarmed first."""
    for start in range(0, len(values), step):
        chunk = values[start : start + step]
        if process.add(products(chunk), len(chunk)):
            return start + len(chunk)
    return None


def test_a_fair_game_is_a_martingale() -> None:
    """Exactly: over all 2^10 outcomes of ten fair accept uniforms the mean wealth is 1."""
    accept_uniforms = np.array(np.meshgrid(*[(-1.0, 1.0)] * 10)).reshape(10, -1).T
    gains = np.log1p(np.array(STAKES) * accept_uniforms[:, :, None]).sum(axis=1)
    assert np.exp(log_wealth(gains)).mean() == pytest.approx(1)


@pytest.mark.parametrize("share", [0.005, 0.02, 0.05])
def test_rare_events_are_taken_in_together_as_one_by_one(share: float) -> None:
    events = np.random.default_rng(6).random((20, 100)) < share
    gains = np.log1p(np.array([0.5, 0.2, 0.05]) / 0.01 * (events[:, :, None] - 0.01))
    together, singly = FreshStarts(1e-3, 3, periods=()), FreshStarts(1e-3, 3, periods=())
    for answer in gains:
        alarms = [singly.add(row, 1) for row in answer]
        assert together.add_each(answer) == any(alarms)
        assert together.leading() == pytest.approx(singly.leading())


def test_a_drift_after_a_long_life_is_found_by_a_fresh_start() -> None:
    random = np.random.default_rng(3)
    process = FreshStarts(1e-6)
    assert feed(process, random.choice([-1.0, 1.0], 300_000)) is None
    late = feed(process, random.choice([-1.0, 1.0], 100_000, p=[0.47, 0.53]))
    random = np.random.default_rng(3)
    lifelong = FreshStarts(1e-6, periods=())
    assert feed(lifelong, random.choice([-1.0, 1.0], 300_000)) is None
    assert late is not None
    assert late < 30_000
    assert feed(lifelong, random.choice([-1.0, 1.0], late, p=[0.47, 0.53])) is None


def test_thresholds_spend_delta_once() -> None:
    process = FreshStarts(1e-6)
    spent = sum(math.exp(-threshold) for threshold in process._thresholds)
    for _ in range(2000):
        process.restart()
        spent += sum(math.exp(-threshold) for threshold in process._thresholds)
    assert 0.99e-6 < spent < 1e-6


def test_it_alarms_again_after_an_alarm() -> None:
    process = FreshStarts(1e-6)
    fault = np.full(2000, 0.5)
    assert feed(process, fault) is not None
    assert feed(process, fault) is not None


def test_a_tolerated_shift_is_no_alarm() -> None:
    values = np.random.default_rng(4).uniform(-0.9, 1.0, 100_000)  # mean 0.05
    tolerant, strict = EProcess(1e-6, shift=0.06), EProcess(1e-6)
    tolerant.add(values)
    strict.add(values)
    assert strict.alarm
    assert not tolerant.alarm


def test_the_evidence_of_an_alarm_is_dated_by_when_it_began() -> None:
    draw = np.random.default_rng(3)
    for mean in (0.1, 0.4, -0.4):
        process, stakes = FreshStarts(1e-6), np.array(STAKES)
        for at in range(10_000):
            values = draw.choice((-1.0, 1.0), size=32) * 0.6 + (mean if at >= 5000 else 0.0)
            if process.add(np.log1p(stakes * values[:, None]).sum(axis=0), 32, float(at)):
                break
        else:
            raise AssertionError("it was not found")
        assert at - 5000 < 2000
        assert abs(process.evidence_since - 5000) <= max(20.0, 0.3 * (at - 5000)), (mean, at, process.evidence_since)


def test_evidence_from_the_very_beginning_is_dated_by_its_first_number() -> None:
    process = FreshStarts(1e-6)
    gains = np.log1p(np.array(STAKES) * 0.9)
    times = iter(range(700, 800))
    while not process.add(gains, 1, float(next(times))):
        pass
    assert process.evidence_since == 700.0
