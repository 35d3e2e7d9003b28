"""A constant error of all logprobs shows in the mean move of their log odds; rounding and repetition do not."""

import math
import random

import pytest

from serve_app.referee.judge.shift import KnownContexts, Move, ShiftTest, contexts_of, move_of_log_odds, moves_of

EDGE, SHIFT, DELTA = 0.25, 0.05, 1e-6


def alarm(moves: list[float]) -> bool:
    """What the test of log odds says, and that of nats of a quarter of these."""
    found = set()
    for move in ((lambda nats: Move(nats, 0.0)), (lambda nats: Move(0.0, nats / 4))):
        test = ShiftTest(EDGE, SHIFT, DELTA)
        test.add(map(move, moves))
        found.add(test.alarm)
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("served", [-1e-6, -0.001, -0.1, -0.7, -3.0, -12.0])
def test_a_nat_on_a_logit_moves_the_log_odds_by_no_more_than_a_nat(served: float) -> None:
    p = math.exp(served)
    for nats in (-1.0, -0.01, 0.01, 1.0):
        replayed = math.log(p * math.exp(nats) / (p * math.exp(nats) + 1 - p))
        move = move_of_log_odds(served, replayed)
        assert 0 <= move / nats <= 1 + 1e-9
        assert p > 0.9 or move == pytest.approx(nats, rel=0.2), "and by nearly as much where a token is not certain"


def test_an_error_of_the_logprob_itself_stands_out_where_a_token_is_nearly_certain() -> None:
    assert move_of_log_odds(-0.041, -0.001) == pytest.approx(1.56, abs=0.01)
    assert move_of_log_odds(-0.73, -0.69) == pytest.approx(0.08, abs=0.01)
    assert move_of_log_odds(-5.04, -5.0) == pytest.approx(0.04, abs=0.001)


def test_what_is_no_number_has_moved_without_bound() -> None:
    assert move_of_log_odds(math.nan, -1.0) == 10.0
    assert move_of_log_odds(-math.inf, -1.0) == 10.0
    assert move_of_log_odds(-1.0, -math.inf) == -10.0


def test_a_text_that_repeats_itself_counts_once() -> None:
    tokens = [1, 2, 3, 4, 5] * 8
    moves = moves_of(tokens, [-1.0] * 30, [-1.1] * 30)
    assert sum(move is not None for move in moves) == 5
    assert moves_of([1, 2, 3], [None, -1.0], [-1.0, -1.0]) == [None, Move(0.0, 0.0)], "no logprob, no move"


def test_contexts_of_earlier_answers_are_known() -> None:
    known, contexts = KnownContexts(), contexts_of(range(12), 8)
    assert known.add(contexts) == [None] * 8
    assert known.add(contexts_of([*range(12), 99], 9), [2] * 9) == [0] * 8 + [None]
    assert known.add(contexts[:1]) == known.add(contexts[:1]) == [2], "the most that it showed"


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(("mean", "found"), [(0.0, False), (SHIFT, False), (0.12, True)])
def test_a_mean_beyond_what_rounding_may_bring_is_found(mean: float, found: bool, side: int) -> None:
    draw = random.Random(1)
    assert alarm([side * (mean + draw.gauss(0, 0.06)) for _ in range(200)]) == found


def test_few_tokens_and_single_outliers_prove_nothing() -> None:
    assert not alarm([])
    assert not alarm([10.0] * 12)
    draw = random.Random(2)
    assert not alarm([draw.gauss(0, 0.03) + (9.0 if number % 25 == 0 else 0.0) for number in range(2000)])


def test_noise_with_heavy_tails_is_accused_no_more_often_than_it_says() -> None:
    draw = random.Random(3)

    def noise() -> float:  # Student's t with 3 degrees of freedom
        return 0.05 * draw.gauss(0, 1) / math.sqrt(sum(draw.gauss(0, 1) ** 2 for _ in range(3)) / 3)

    assert not any(alarm([noise() for _ in range(64)]) for _ in range(2000))


def test_a_tolerance_that_allows_as_much_as_a_logit_may_move_switches_it_off() -> None:
    test = ShiftTest(EDGE, EDGE, DELTA)
    test.add([Move(10.0, 10.0)] * 10_000)
    assert not test.alarm
