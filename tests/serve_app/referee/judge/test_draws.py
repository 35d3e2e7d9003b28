"""Verdicts on draws: from what an engine served, by way of the record, to what the referee says of each answer."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest

from serve_app.backends.base import Replayed
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.draws import DrawResult, DrawTest, DrawTolerance, check_draws, placement_checks
from serve_app.referee.judge.drift import TokenDrift
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Verdict
from speculative.request import ReplayedToken, Request, SamplingParams, TokenKind
from speculative.selfcheck.replayed_draws import DrawCheck
from tests.support.referees import Court, EngineReplay, recorded, serve
from tools.faults.toy import table_engine
from tools.faults.traffic import PLAIN, sampling

NUM_TOKENS = 256
LOGPROBS = dataclasses.replace(PLAIN, logprobs=0)


def answers(count: int, seed: int = 0) -> Iterator[Answer]:
    engine = table_engine(NUM_TOKENS)
    for request in itertools.islice(sampling(NUM_TOKENS, LOGPROBS, seed), count):
        yield serve(engine, dataclasses.replace(request, request_id=f"{request.request_id}-0"))


@pytest.fixture
def real(court: Court) -> Court:
    court.checker.replay = EngineReplay(table_engine(NUM_TOKENS))
    return court


async def test_answers_that_follow_from_their_seeds_are_verified(real: Court) -> None:
    for answer in answers(8):
        checked = await real.checker.check(answer)
        assert (checked.verdict, checked.reason) == (Verdict.VERIFIED, "replayed")
        assert "draws" in checked.checks and checked.draws.num_checked == len(answer.token_ids)
        counts = dict.fromkeys(("num_checked", "num_follows"), len(answer.token_ids))
        expected = counts | {"num_near": 0, "num_wrong": 0, "worst": [], "unchecked": None}
        assert checked.to_wire()["draws"] == expected
    assert real.on_heartbeat("r1").findings == ()


async def test_the_same_seed_everywhere_hides_nothing(real: Court) -> None:
    """A client that sends one seed for all of its requests: each answer is checked by its own draws."""
    engine = table_engine(NUM_TOKENS)
    verdicts = []
    for number in range(12):
        answer = serve(engine, Request(f"cmpl-{number}-0", (3 + number,), LOGPROBS, seed=42))
        if number % 2:
            answer = dataclasses.replace(
                answer, request=dataclasses.replace(answer.request, seed=43)
            )  # other random numbers
        verdicts.append((await real.checker.check(answer)).verdict)
    assert verdicts == [Verdict.VERIFIED, Verdict.SUSPECT] * 6
    assert "draws" in {finding.alarm for finding in real.on_heartbeat("r1").findings}


async def test_an_answer_without_rounds_says_that_its_draws_were_not_checked(real: Court) -> None:
    (answer,) = answers(1)
    for rounds in ((), answer.rounds[:-1]):
        checked = await real.checker.check(dataclasses.replace(answer, rounds=rounds))
        assert "draws" not in checked.checks and checked.verdict is Verdict.VERIFIED
        assert checked.to_wire()["draws"]["unchecked"] == "the engine did not report how it sampled"


def test_the_tolerance_follows_the_noise_of_the_pair() -> None:
    tolerance = DrawTolerance(edge_nats=0.25)
    assert tolerance.nats == 0.25, "unknown yet"
    tolerance.add([0.0] * 256)
    assert tolerance.nats == 1e-3, "equal arithmetic"
    tolerance.add([0.02, -0.02] * 5_000)
    assert tolerance.nats == pytest.approx(0.24, rel=0.05)
    tolerance.add([-3.0] * 100_000)
    assert tolerance.nats == 0.25, "no fault passes for noise"


def test_where_arithmetic_differs_tokens_near_an_edge_get_the_benefit_of_the_doubt() -> None:
    check = DrawCheck(0, "interval", miss=3.0, loose=0.0)
    tolerance = DrawTolerance(edge_nats=0.25)
    assert tolerance.judge(check, None) is DrawResult.FOLLOWS
    tolerance.add([0.0] * 256)
    assert tolerance.judge(check, None) is DrawResult.WRONG
    assert tolerance.judge(DrawCheck(0, "interval", math.nan, math.nan), None) is DrawResult.WRONG
    wide, check = DrawTolerance(edge_nats=0.25), DrawCheck(0, "choice", miss=0.6, loose=0.6)
    assert wide.judge(check, None) is DrawResult.WRONG
    assert wide.judge(check, TokenDrift.between(-1.0, -1.15)) is DrawResult.NEAR, "it may miss by as much as drifted"


def test_draws_by_the_drafter_have_the_noise_of_its_own_rounding() -> None:
    tolerance = DrawTolerance(edge_nats=0.25)
    tolerance.add([0.0] * 256)
    check, other = DrawCheck(0, "recovered", 0.1, 0.1, draft_drift=0.0), DrawCheck(0, "interval", 0.1, 0.1)
    tolerance.add_drafts([check] * 300)
    assert tolerance.judge(check, None) is DrawResult.WRONG, "equal arithmetic"
    assert tolerance.judge(check._replace(loose=0.0), None) is DrawResult.FOLLOWS, "a filter's edge"
    tolerance.add_drafts([other._replace(draft_drift=0.02)] * 10_000)
    assert tolerance.judge(check, None) is DrawResult.NEAR
    assert tolerance.judge(other, None) is DrawResult.WRONG
    moved = check._replace(miss=0.6, loose=0.6)
    assert tolerance.judge(moved, None) is DrawResult.WRONG
    assert tolerance.judge(moved._replace(draft_drift=0.1), None) is DrawResult.NEAR
    tolerance.add_drafts([check._replace(draft_drift=math.inf)] * 100_000)
    assert tolerance.judge(check._replace(miss=4.1, loose=4.1), None) is DrawResult.WRONG, "no fault passes for noise"


def test_a_token_is_as_wrong_as_the_worst_of_its_checks() -> None:
    checks = [DrawCheck(1, "rejected", 0.0, 0.0), DrawCheck(1, "support", 2.0, 2.0), DrawCheck(0, "interval", 0.1, 0.1)]
    found = check_draws(3, checks, DrawTolerance(edge_nats=0.25).judge_all(checks, [None] * 3))
    assert found.results == (DrawResult.NEAR, DrawResult.WRONG, None)
    assert [check.kind for check in found.worst] == ["support", "interval"]
    assert (found.wrong, found.num_checked) == (1, 2)
    assert found.reason != ""


def test_rounding_alone_raises_no_alarm_and_many_near_draws_do() -> None:
    chance = random.Random(2)
    sound, faulty = DrawTest(1e-6), DrawTest(1e-6)
    for _ in range(200):
        sound.add([DrawResult.NEAR if chance.random() < 0.01 else DrawResult.FOLLOWS for _ in range(100)])
    assert not sound.alarm
    for _ in range(20):
        faulty.add([DrawResult.NEAR if chance.random() < 0.1 else DrawResult.FOLLOWS for _ in range(100)])
    assert faulty.alarm
    wrong = DrawTest(1e-6)
    wrong.add([DrawResult.WRONG] * 3)
    assert wrong.alarm


def row(gap: float = 0.0, outside: float = 0.0) -> ReplayedToken:
    return ReplayedToken(0.5, 0.5, 0.7, 0.7, gap, outside)


@pytest.mark.parametrize(("gap", "verdict"), [(0.2, Verdict.VERIFIED), (0.3, Verdict.SUSPECT)])
def test_one_greedy_token_that_no_rounding_explains_is_enough(gap: float, verdict: Verdict) -> None:
    rows = [row()] * 199 + [row(gap)]
    request = Request("cmpl-1", (1, 2, 3), SamplingParams(temperature=0))
    fields = {"token_ids": (5,) * 200, "logprobs": (-0.7,) * 200, "max_model_len": 512}
    fields |= {"rounds_since_handoff": (None,) * 200, "preempted": (False,) * 200, "kinds": (TokenKind.BONUS,) * 200}
    judge = Judge(Tolerance.between_equals("bfloat16"))
    for number in range(3):  # quiet logprobs of other answers do not make it stricter with this one
        judge.judge(recorded(f"cmpl-{number}", request=request, **fields), Replayed((-0.7,) * 200, (row(),) * 200))
    judged = judge.judge(recorded("cmpl-9", request=request, **fields), Replayed((-0.7,) * 200, tuple(rows)))
    assert judged.checked.verdict is verdict
    if verdict is Verdict.SUSPECT:
        assert judged.checked.reason == "likeliest: token 199 is 0.3 nats below the likeliest"


@pytest.mark.parametrize(
    ("params", "outside", "misses"),
    [
        (SamplingParams(top_k=8), 0.6, [0.6]),
        (SamplingParams(top_p=0.9), 3.0, []),  # a mass that rounding moves by a thousandth may end whole nats below
        (SamplingParams(min_p=0.1), 3.0, []),
        (SamplingParams(top_p=0.9), math.inf, [math.inf]),
        (SamplingParams(), 0.0, []),
    ],
)
def test_a_token_outside_the_filters_counts_by_itself_where_their_edge_lies_in_nats(
    params: SamplingParams, outside: float, misses: list[float]
) -> None:
    checks = placement_checks([row(), row(outside=outside)], params)
    assert [(check.token_index, check.kind) for check in checks] == [(1, "allowed")] * len(misses)
    assert [check.miss for check in checks] == pytest.approx(misses)
