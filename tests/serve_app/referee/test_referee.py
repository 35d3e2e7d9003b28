"""The referee on a fake replica: what it compares, what it finds, whom it reports to, and what it remembers."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.guard.breaker import BreakerState, Mode
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Finished, Trip, Verdict
from speculative.errors import EngineFault, EngineOverloaded, InvalidRequest, SequenceTooLong
from speculative.request import ReplayedToken, Request, SamplingParams
from speculative.stats import Evidence
from tests.support.referees import NUM_TOKENS, RIGHT, TOLERANCE, Court, served


async def test_an_answer_that_is_right_is_verified_and_counted_by_stratum(court: Court) -> None:
    checked = await court.checker.check(served())
    assert checked.verdict is Verdict.VERIFIED
    assert (checked.tme, checked.num_tokens, checked.replayed_by) == (1.0, NUM_TOKENS, "p9")
    (forced,) = court.replayer.asked
    assert forced.prompt_token_ids == (1, 2, 3, *range(NUM_TOKENS))
    assert (forced.score_from, forced.params.temperature) == (3, 1.0)
    expected = {"all": 20, "first": 1, "accepted": 19, "handoff_0": 1, "handoff_2_7": 6, "near_limit": 2}
    expected |= {"sampled": 20, "plain": 0}
    assert expected == {name: court.value("truespec_replay_tokens_total", stratum=name) for name in expected}
    assert court.value("truespec_replays_total", result="ok") == 1
    assert court.on_heartbeat().findings == ()


async def test_the_lag_is_the_age_of_the_oldest_answer_that_is_not_replayed(court: Court) -> None:
    def lag() -> float:
        court.counts.set_gauges(court.checker)
        return court.value("truespec_replay_lag_seconds")

    assert lag() == 0
    court.replayer.open.clear()
    first = asyncio.create_task(court.checker.check(served(1)))
    await asyncio.sleep(0.2)
    second = asyncio.create_task(court.checker.check(served(2)))
    await asyncio.sleep(0)
    assert lag() > 0.1
    court.replayer.open.set()
    await asyncio.gather(first, second)
    assert lag() == 0


async def test_a_prompt_whose_logprobs_were_reported_is_replayed_by_itself(court: Court) -> None:
    params = SamplingParams(temperature=0.5, prompt_logprobs=1, max_tokens=NUM_TOKENS)
    checked = await court.checker.check(served(params=params, prompt_logprobs=(-1.0, -1.0)))
    assert checked.verdict is Verdict.VERIFIED
    asked = [(request.score_from, request.params.temperature) for request in court.replayer.asked]
    assert asked == [(3, 0.5), (1, 1.0)]
    assert all(request.params.prompt_logprobs is None for request in court.replayer.asked)
    assert court.value("truespec_replay_tokens_total", stratum="prompt") == 2
    assert court.value("truespec_replay_tokens_total", stratum="all") == 20


async def test_drift_makes_an_answer_suspect_and_is_reported_to_who_made_it(court: Court) -> None:
    court.replayer.drift = -0.8
    checked = await court.checker.check(served())
    assert (checked.verdict, checked.reason) == (Verdict.SUSPECT, "drift")
    findings = court.on_heartbeat("r1").findings
    assert {finding.alarm for finding in findings} == {"drift"}
    assert "all" in {finding.stratum for finding in findings}
    assert all(finding.began_at == 10.0 for finding in findings)
    assert court.on_heartbeat("p1").findings == (), "one first token is not enough to blame the prefill replica"
    assert court.on_heartbeat("r1").findings == (), "findings are delivered once"
    assert court.value("truespec_replay_alarms_total", alarm="drift", stratum="all") >= 1
    (incident,) = court.book.overview()["incidents"]
    assert (incident["kind"], incident["name"], incident["replica"]) == ("replay", "drift", "r1")
    assert "all" in incident["strata"]
    assert court.value("truespec_verdicts_total", verdict="suspect") == 1
    path = await court.dump("*drift*")
    dump = json.loads(path.read_text())
    assert dump["served"]["token_ids"] == list(range(NUM_TOKENS))
    assert dump["served"]["request"]["params"]["temperature"] == 1.0
    assert dump["replayed"]["logprobs"] == [-1.8] * NUM_TOKENS


async def test_a_finding_says_when_its_evidence_began(court: Court) -> None:
    wrong = ReplayedToken(0.3, 0.5, 1.2, 1.0, 3.0, 0.0)
    for number in range(60):
        court.replayer.row = lambda _, number=number: wrong if number >= 30 else RIGHT  # type: ignore[misc]
        await court.checker.check(served(number, began_at=100.0 + 10 * number))
        if findings := court.on_heartbeat("r1").findings:
            break
    else:
        raise AssertionError("nothing was found")
    assert {finding.alarm for finding in findings} <= {"probability", "surprisal"}
    assert {finding.evidence_since for finding in findings} == {400.0}
    assert all(finding.began_at > 400.0 for finding in findings)
    dumped = (await court.dump("*-alarm-*")).read_text()
    assert f'"request_id":"cmpl-{number}-0"' in dumped, "the answer that completed it, whatever its own verdict"


async def test_what_breaks_an_assumed_tolerance_is_an_incident_and_trips_nothing(court: Court) -> None:
    court.book.tolerances = dataclasses.replace(TOLERANCE, assumed=True)
    court.replayer.drift = -0.8
    assert (await court.checker.check(served())).verdict is Verdict.SUSPECT
    assert court.on_heartbeat("r1").findings == ()
    assert [one["name"] for one in court.book.overview()["incidents"]] == ["drift"]


async def test_drift_of_first_tokens_is_the_prefill_replicas(court: Court) -> None:
    for number in range(6):
        court.replayer.drift = -5.0
        await court.checker.check(served(number, num_tokens=1))
    assert court.on_heartbeat("p1").findings != ()
    assert court.on_heartbeat("r1").findings == ()


@pytest.mark.parametrize("state", [BreakerState.CLOSED, BreakerState.CANARY, BreakerState.OPEN])
async def test_drift_where_nothing_is_drafted_may_be_either_replicas(court: Court, state: BreakerState) -> None:
    court.on_heartbeat("r1", since=10.0, state=state)
    court.replayer.drift = -0.8
    await court.checker.check(served(num_drafted=0, began_at=20.0))
    assert court.on_heartbeat("r1", since=10.0, state=state).findings != ()
    assert (court.on_heartbeat("p1").findings != ()) == (state is BreakerState.OPEN)


SAMPLED, GREEDY = (SamplingParams(temperature=one, max_tokens=NUM_TOKENS) for one in (1.0, 0.0))


@pytest.mark.parametrize(
    ("params", "seeds", "row", "checks", "distribution"),
    [
        (SAMPLED, (7,), RIGHT, ["logprobs", "support", "distribution"], "tested"),
        (SAMPLED, (7, 7), RIGHT, ["logprobs", "support"], "chosen_seed"),
        (SAMPLED, (7, 8), RIGHT, ["logprobs", "support", "distribution"], "tested"),
        (GREEDY, (7, 7), RIGHT, ["logprobs", "likeliest"], "greedy"),
        (SAMPLED, (7,), None, ["logprobs"], "untested"),
    ],
    ids=["sampled", "a seed seen before", "another seed", "greedy", "logprobs only"],
)
async def test_a_verdict_says_what_was_checked(
    court: Court,
    params: SamplingParams,
    seeds: tuple[int, ...],
    row: ReplayedToken | None,
    checks: list[str],
    distribution: str,
) -> None:
    court.replayer.row = lambda _: row
    for number, seed in enumerate(seeds):
        answer = served(number, params=params)
        asked = Request(answer.request.request_id, answer.request.prompt_token_ids, params, seed)
        checked = await court.checker.check(served(number, request=asked))
        assert checked.verdict is (Verdict.LOGPROBS_ONLY if row is None else Verdict.VERIFIED)
    reply = court.book.verdicts.reply(f"cmpl-{len(seeds) - 1}")
    assert reply is not None
    assert (reply["checked"], reply["choices"][0]["checked"]) == (checks, checks)
    assert reply["choices"][0]["distribution"] == distribution
    assert court.book.overview()["latest"][0]["checked"] == checks
    assert court.value("truespec_replay_distributions_total") == len(seeds)
    assert court.value("truespec_replay_distributions_total", distribution=distribution) >= 1


async def test_an_answer_without_logprobs_is_judged_by_its_tokens(court: Court) -> None:
    checked = await court.checker.check(served(0, logprobs=()))
    assert (checked.verdict, checked.checks) == (Verdict.VERIFIED, ("support", "distribution"))
    assert (checked.tme, checked.max_drift_nats, checked.num_tokens) == (None, None, NUM_TOKENS)
    assert court.value("truespec_replay_tokens_total") == 0, "no logprob was compared"
    prompted = await court.checker.check(served(1, logprobs=(), prompt_logprobs=(-1.0, -1.0)))
    assert (prompted.tme, prompted.checks) == (1.0, ("support", "distribution")), "not those of the answer"
    assert court.value("truespec_replay_tokens_total", stratum="prompt") == 2
    court.replayer.row = lambda index: ReplayedToken(0.0, 0.5, 10.0, 0.7, 9.0, float("inf")) if index == 7 else RIGHT
    wrong = await court.checker.check(served(2, logprobs=()))
    assert (wrong.verdict, wrong.reason) == (Verdict.SUSPECT, "distribution: support")
    assert {finding.alarm for finding in court.on_heartbeat("r1").findings} == {"support"}
    court.replayer.row = lambda _: None
    nothing = await court.checker.check(served(3, logprobs=()))
    assert (nothing.verdict, nothing.checks, nothing.num_tokens) == (Verdict.UNVERIFIED, (), 0)


async def test_an_answer_whose_sampling_is_not_known_is_judged_by_its_logprobs_alone(court: Court) -> None:
    court.replayer.row = lambda index: ReplayedToken(0.0, 0.5, 10.0, 0.7, 9.0, float("inf")) if index == 7 else RIGHT
    checked = await court.checker.check(dataclasses.replace(served(1), untested="mirostat changes it"))
    assert (checked.verdict, checked.checks, checked.distribution) == (Verdict.LOGPROBS_ONLY, ("logprobs",), "untested")
    court.replayer.drift = -0.8
    drifted = await court.checker.check(dataclasses.replace(served(2), untested="mirostat changes it"))
    assert (drifted.verdict, drifted.reason) == (Verdict.SUSPECT, "drift")


async def test_a_client_that_repeats_its_seed_repeats_its_luck_and_alarms_nobody(court: Court) -> None:
    court.replayer.row = lambda _: ReplayedToken(0.02, 0.5, 5.0, 1.0, 3.0, 0.0)
    for number in range(20):
        again = served(number)
        lucky = Request(again.request.request_id, again.request.prompt_token_ids, again.request.params, seed=7)
        await court.checker.check(served(number, request=lucky))
    assert court.on_heartbeat("r1").findings == ()


async def test_what_began_before_a_replica_changed_says_nothing_about_it(court: Court) -> None:
    court.on_heartbeat("r1", since=500.0)
    court.replayer.drift = -0.8
    assert (await court.checker.check(served(began_at=499.0))).verdict is Verdict.SUSPECT
    assert court.on_heartbeat("r1", since=500.0).findings == ()
    await court.checker.check(served(began_at=501.0))
    assert court.on_heartbeat("r1", since=500.0).findings != ()


async def test_a_canary_is_judged_and_blames_nobody(court: Court) -> None:
    court.replayer.drift = -0.8
    params = SamplingParams(max_tokens=NUM_TOKENS)
    canary = served(request=Request("canary-x-0", (1, 2, 3), params, canary=True))
    assert (await court.checker.check(canary)).verdict is Verdict.SUSPECT
    assert '"request_id":"canary-x-0"' in (await court.dump("*-drift")).read_text()
    impossible = dataclasses.replace(canary, max_model_len=NUM_TOKENS)
    assert (await court.checker.check(impossible)).verdict is Verdict.SUSPECT
    assert '"request_id":"canary-x-0"' in (await court.dump("*-impossible*")).read_text()
    assert court.on_heartbeat("r1").findings == ()
    assert court.book.verdicts.reply("canary-x") is None


async def test_a_full_queue_skips_and_says_so(tmp_path: Path) -> None:
    court = Court(tmp_path, max_queue=3, max_running=2)
    work = asyncio.create_task(court.checker.run())
    court.replayer.open.clear()
    for number in range(10):
        court.checker.submit(served(number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert court.value("truespec_replays_total", result="skipped") == 5
    assert len(court.replayer.asked) == 2
    warm = SamplingParams(temperature=0.9, max_tokens=NUM_TOKENS)
    urgent = asyncio.create_task(court.checker.check(served(99, params=warm)))
    await asyncio.sleep(0)
    court.replayer.open.set()
    assert (await urgent).verdict is Verdict.VERIFIED
    assert court.replayer.asked[2].params.temperature == 0.9, "who is waited for comes first"
    work.cancel()


async def test_a_replay_that_fails_leaves_the_answer_unverified_and_the_referee_at_work(court: Court) -> None:
    court.replayer.fails = 2
    checked = await court.checker.check(served(1, replica="r2"))
    assert (checked.verdict, checked.reason) == (Verdict.UNVERIFIED, "the replay failed")
    assert (checked.checks, checked.distribution) == ((), "untested")
    assert court.value("truespec_replay_distributions_total") == 0
    assert (await court.checker.check(served(2))).verdict is Verdict.VERIFIED
    assert court.value("truespec_replays_total", result="failed") == 1
    assert court.value("truespec_replays_total", result="ok") == 1
    court.counts.set_gauges(court.checker)
    recent = {replica: court.value("truespec_recent_replays", answered_by=replica) for replica in ("r1", "r2")}
    failed = {replica: court.value("truespec_recent_replay_failures", answered_by=replica) for replica in recent}
    assert (recent, failed) == ({"r1": 1, "r2": 1}, {"r1": 0, "r2": 1})


async def test_a_replay_that_fails_is_tried_again_elsewhere(court: Court) -> None:
    court.replayer.fails = 1
    prompt_logprobs = (-1.0, -1.0)
    assert (await court.checker.check(served(prompt_logprobs=prompt_logprobs))).verdict is Verdict.VERIFIED
    assert court.replayer.avoided == [(), ("p8",), ("p8",)], "the prompt's part comes of the same replica"
    assert court.value("truespec_replays_total") == court.value("truespec_replays_total", result="ok") == 1


async def assert_impossible(court: Court, answer: Answer, why: str) -> None:
    """The answer is suspect, and who made it hears of it."""
    checked = await court.checker.check(answer)
    assert checked.verdict is Verdict.SUSPECT
    assert checked.reason.startswith("impossible") and why in checked.reason
    reported = court.book.verdicts.reply("cmpl-1")
    assert reported is not None and reported["verdict"] == "suspect"
    assert court.value("truespec_replays_total", result="refused") == 1
    assert court.value("truespec_replays_total", result="failed") == 0
    assert court.value("truespec_replay_alarms_total", alarm="impossible", stratum="all") == len(set(answer.made_by))
    assert court.value("truespec_verdicts_total", verdict="suspect") == 1
    for maker in set(answer.made_by):
        (finding,) = court.on_heartbeat(maker).findings
        assert (finding.alarm, finding.began_at) == ("impossible", 10.0)
    await court.dump("*impossible*")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_model_len": 3 + NUM_TOKENS - 1}, "longer than the longest sequence"),
        ({"params": SamplingParams(max_tokens=19)}, "it has 20 tokens, and max_tokens is 19"),
    ],
)
async def test_an_answer_one_token_longer_than_it_may_be_is_a_finding(
    court: Court, changes: dict[str, Any], why: str
) -> None:
    """Nobody needs to be asked, and so nobody can be too obliging."""
    assert (await court.checker.check(served(0, max_model_len=3 + NUM_TOKENS))).verdict is Verdict.VERIFIED
    await assert_impossible(court, served(1, **changes), why)
    assert len(court.replayer.asked) == 1


async def test_an_answer_that_no_engine_takes_is_a_finding(court: Court) -> None:
    court.replayer.refuses = InvalidRequest("prompt", "Token ids must be between 0 and 63.")
    await assert_impossible(court, served(1), "Token ids must be between 0 and 63.")


@pytest.mark.parametrize(
    "error",
    [
        EngineOverloaded("All replicas are busy."),
        EngineFault("The engine was stopped."),
        SequenceTooLong("prompt", "The prompt has 23 tokens; this model takes at most 16."),
        InvalidRequest("model", "This engine has no adapters."),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_replayer_that_did_not_look_at_the_answer_finds_nothing(court: Court, error: Exception) -> None:
    """It is busy, gone, takes shorter sequences than the engine that answered, or cannot do what was asked for."""
    court.replayer.refuses = error
    checked = await court.checker.check(served(1))
    assert (checked.verdict, checked.reason) == (Verdict.UNVERIFIED, "the replay failed")
    assert court.value("truespec_replays_total", result="failed") == 1
    assert court.value("truespec_replays_total", result="refused") == 0
    assert court.on_heartbeat().findings == ()


async def test_a_trip_makes_answers_suspect_and_writes_a_dump(court: Court) -> None:
    await court.checker.check(served(1))
    finished = tuple(Finished(f"cmpl-{number}-0", 10, 12 + number) for number in range(3))
    court.on_heartbeat("r1", finished=finished)
    assert (court.book.verdicts.reply("cmpl-1") or {})["verdict"] == "verified"
    evidence = (Evidence(served(2).request, (7, 8)),)
    court.on_heartbeat("r1", since=20.0, trips=(Trip("selfcheck", 20.0, 13.0, evidence),))
    reported = [(court.book.verdicts.reply(f"cmpl-{number}") or {})["verdict"] for number in range(3)]
    assert reported == ["unverified", "suspect", "suspect"]
    path = await court.dump("*trip-selfcheck*")
    dump = json.loads(path.read_text())
    assert dump["replica"]["replica"] == "r1"
    assert [one["request"]["request_id"] for one in dump["trip"]["evidence"]] == ["cmpl-2-0"]
    assert [replay["served"]["request"]["request_id"] for replay in dump["replays"]] == ["cmpl-1-0"]


async def test_an_operators_order_reaches_one_replica_or_all_and_those_to_come(court: Court) -> None:
    court.on_heartbeat("r1")
    court.on_heartbeat("r2")
    assert court.registry.order(Mode.OFF, "nobody") is None
    assert [status["replica"] for status in court.registry.order(Mode.OFF, "r2") or ()] == ["r1", "r2"]
    assert court.on_heartbeat("r1").mode is None
    assert court.on_heartbeat("r2").mode is Mode.OFF
    assert court.on_heartbeat("r2").mode is None, "it was delivered"
    court.registry.order(Mode.ON, None)
    assert [court.on_heartbeat(name).mode for name in ("r1", "r2", "r3")] == [Mode.ON] * 3
