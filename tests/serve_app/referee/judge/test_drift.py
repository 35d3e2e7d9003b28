"""Drift by hand, and when it is too much."""

import math
import random

import pytest

from serve_app.referee.judge.drift import Cusum, NoiseFloor, TokenDrift, request_drifted, tme_of


def drifts(*nats: float) -> list[TokenDrift]:
    return [TokenDrift.between(-2.0, -2.0 + value) for value in nats]


def test_one_tokens_drift_by_hand() -> None:
    drift = TokenDrift.between(math.log(0.5), math.log(0.25))
    assert drift.nats == pytest.approx(math.log(2))
    assert drift.excess == pytest.approx(1.0)
    assert drift.ratio == pytest.approx(0.5)
    assert drift.gen_kl == pytest.approx(0.5 + math.log(2) - 1)
    other = TokenDrift.between(math.log(0.25), math.log(0.5))
    assert (other.nats, other.excess) == pytest.approx((drift.nats, drift.excess))
    assert other.ratio == pytest.approx(2.0)
    assert (tme_of(drifts(0.0, 0.0)), tme_of([drift, *drifts(0.0)])) == pytest.approx((1.0, 1.5))
    assert TokenDrift.between(-10.5, -10.0).counted == pytest.approx(math.expm1(0.25)), "what is all but excluded"


@pytest.mark.parametrize(
    ("served", "replayed"), [(math.nan, -1.0), (-1.0, math.nan), (-math.inf, -1.0), (-500.0, -1.0)]
)
def test_what_is_no_number_or_too_far_is_clipped(served: float, replayed: float) -> None:
    drift = TokenDrift.between(served, replayed)
    assert drift.nats == 10
    assert all(math.isfinite(value) for value in (drift.excess, drift.ratio, drift.gen_kl))


def bfloat16_noise(count: int, seed: int) -> list[float]:
    """|g - t| with the mean that was measured in bfloat16 (TME 1.026), and heavy tails."""
    draw = random.Random(seed)
    return [abs(draw.gauss(0, 0.02) * (1 + 3 * (draw.random() < 0.1))) for _ in range(count)]


def test_noise_raises_no_alarm_in_a_long_life() -> None:
    cusum = Cusum()
    values = [drift.excess for drift in drifts(*bfloat16_noise(200_000, 1))]
    assert sum(values) / len(values) == pytest.approx(0.02, abs=0.006)
    assert not cusum.add(values, 0.05)
    assert not Cusum().add([math.expm1(10.0)], 0.05), "a single token is not enough"


@pytest.mark.parametrize(("nats", "share", "most"), [(0.1, 1.0, 80), (2.0, 0.1, 120), (0.7, 0.5, 20)])
def test_drift_is_noticed_soon_even_after_a_long_good_time(nats: float, share: float, most: int) -> None:
    cusum = Cusum()
    cusum.add([0.0] * 100_000, 0.05)
    draw = random.Random(2)
    faulty = [nats * (draw.random() < share) for _ in range(most)]
    assert cusum.add((drift.excess for drift in drifts(*faulty)), 0.05)


def test_the_noise_floor_widens_the_tolerance_but_only_so_far() -> None:
    floor = NoiseFloor(min_tokens=10)
    floor.add(drifts(*[0.02] * 9))
    assert floor.tolerance(1.05) == pytest.approx(0.05), "too little is known"
    floor.add(drifts(0.02))
    assert floor.tolerance(1.05) == pytest.approx(0.05 + math.expm1(0.02 / 1.198), abs=1e-9)
    floor.add(drifts(*[3.0] * 100))
    assert floor.tolerance(1.05) == pytest.approx(0.1), "an engine that is wrong without drafts teaches nothing"


@pytest.mark.parametrize(
    ("nats", "wrong"),
    [
        ([0.0] * 50, False),
        (bfloat16_noise(300, 3), False),
        ([0.6] + [0.0] * 9, False),
        ([2.0] + [0.0] * 9, True),
        ([6.0] + [0.0] * 5000, True),
        ([0.12] * 100, True),
        ([0.4], False),  # in an answer of one token the mean is that token
        ([1.2], True),
        ([], False),
    ],
)
def test_one_requests_own_tokens_may_be_enough(nats: list[float], wrong: bool) -> None:
    assert request_drifted(drifts(*nats), 0.05) == wrong


def test_the_evidence_of_a_sum_is_dated_by_when_it_last_was_nothing() -> None:
    cusum = Cusum()
    values = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.1, 1.0, 1.0, 1.0)  # nothing is left of the first after four more
    raised = [cusum.add([value], 0.2, at=100.0 + index) for index, value in enumerate(values)]
    assert raised == [False] * 10 + [True]
    assert cusum.evidence_since == 106.0
