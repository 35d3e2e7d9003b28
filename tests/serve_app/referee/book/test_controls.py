"""Answers made wrong on purpose: a sound referee finds each, and one that has gone blind is noticed."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from serve_app.backends.base import Replayed
from serve_app.guard.referee_counts import count_controls
from serve_app.referee.book.controls import CONTROL_CHANGES, CONTROL_RESULTS, Controls
from serve_app.referee.book.replay_checker import Replay, ReplayChecker
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge, Judgement, Judging
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from tests.support.engines import NGRAM, markov_engine
from tests.support.referees import TOLERANCE, EngineReplay, serve

SAMPLED = SamplingParams(max_tokens=120, ignore_eos=True, logprobs=0)
GREEDY = dataclasses.replace(SAMPLED, temperature=0.0)


async def controlled(
    answers: Collection[Answer], replay: Replay, judge: Judging | None = None, every: int = 1
) -> Counter[tuple[str, str]]:
    """What became of the controls when a referee had verified these answers, each before the next was served."""
    judge = judge or Judge(TOLERANCE).judge
    ended: Counter[tuple[str, str]] = Counter()
    dumped: list[str] = []
    kept: dict[str, Any] = {"ended": lambda *result: ended.update([result]), "dump": lambda why, _: dumped.append(why)}
    controls = Controls(replay, judge, every=every, **kept)
    checker = ReplayChecker(replay, judge, ReplicaBook(TOLERANCE), verified=controls.offer)
    async with asyncio.TaskGroup() as tasks:
        work = [tasks.create_task(one.run()) for one in (checker, controls)]
        for answer in answers:
            assert (await checker.check(answer)).reason == "replayed"
            for _ in range(3):
                await asyncio.sleep(0)  # the control follows
        for task in work:
            task.cancel()
    assert sorted(dumped) == sorted(f"control {change}" for change, result in ended.elements() if result == "missed")
    return ended


@pytest.fixture
def engine() -> EngineCore:
    """Of eight tokens; what follows half of them is all but certain, what follows the others is drawn from three."""
    rows = []
    for token in range(8):
        row = [1e-4] * 8
        if token % 2:
            row[(token + 1) % 8] = 1.0
        else:
            row[token + 1] = row[(token + 3) % 8] = row[(token + 5) % 8] = 0.5
        rows.append([one / sum(row) for one in row])
    return markov_engine(rows, drafter=NGRAM)


def answers_of(engine: EngineCore, params: SamplingParams, number: int) -> list[Answer]:
    return [serve(engine, Request(f"r{seed}-0", (1 + seed % 7, 2), params, seed=seed)) for seed in range(number)]


async def test_a_sound_referee_finds_every_change(engine: EngineCore) -> None:
    ended = await controlled(answers_of(engine, dataclasses.replace(SAMPLED, logprobs=3), 15), EngineReplay(engine))
    assert ended == dict.fromkeys(((change, "found") for change in CONTROL_CHANGES), 3)


@pytest.mark.parametrize("change", ["alternatives", "limit"])
async def test_a_referee_that_no_longer_compares_something_is_noticed(
    engine: EngineCore, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "alternatives":
        monkeypatch.setattr("serve_app.referee.judge.judgement.ComparedAlternatives.wrong", lambda *_: "")
    else:
        monkeypatch.setattr("serve_app.referee.book.replay_checker.broken_limit", lambda *_: "")
    ended = await controlled(answers_of(engine, dataclasses.replace(SAMPLED, logprobs=3), 5), EngineReplay(engine))
    assert ended == {(one, "missed" if one == change else "found"): 1 for one in CONTROL_CHANGES}


@pytest.mark.parametrize(("logprobs", "expected"), [(0, 0), (1, 1), (3, 1)])
async def test_what_is_reported_of_a_prompt_is_no_control(engine: EngineCore, logprobs: int, expected: int) -> None:
    params = dataclasses.replace(SAMPLED, logprobs=logprobs, prompt_logprobs=3)
    ended = await controlled(answers_of(engine, params, 10), EngineReplay(engine))
    assert {change: result for change, result in ended if result != "found"} == {}
    assert bool(ended["alternatives", "found"]) == bool(expected)


async def test_greedy_answers_have_no_seed_to_change(engine: EngineCore) -> None:
    ended = await controlled(answers_of(engine, GREEDY, 10), EngineReplay(engine))
    assert ended == {("logprobs", "found"): 4, ("token", "found"): 3, ("limit", "found"): 3}


async def test_a_referee_that_lost_the_rows_or_a_limit_is_noticed(engine: EngineCore) -> None:
    whole, num_replays = EngineReplay(engine), 0

    async def replay(request: Request, avoid: Collection[str]) -> Replayed:
        nonlocal num_replays
        num_replays += 1
        replayed = await whole(request, avoid)
        return replayed if num_replays <= 4 else dataclasses.replace(replayed, replayed=None)

    ended = await controlled(answers_of(engine, SAMPLED, 17), replay)
    assert ended["token", "missed"] >= 2 and ended["seed", "missed"] >= 2 and ended["logprobs", "found"] >= 4
    careless = Judge(dataclasses.replace(TOLERANCE, max_tme=100.0, jump_nats=100.0)).judge
    assert (await controlled(answers_of(engine, SAMPLED, 3), whole, careless))["logprobs", "missed"] >= 1


async def test_engines_that_replay_logprobs_only_are_asked_for_no_more(engine: EngineCore) -> None:
    whole = EngineReplay(engine)

    async def replay(request: Request, avoid: Collection[str]) -> Replayed:
        return dataclasses.replace(await whole(request, avoid), replayed=None)

    ended = await controlled(answers_of(engine, SAMPLED, 6), replay)
    assert ended == {("logprobs", "found"): 3, ("limit", "found"): 3}


async def test_what_is_short_or_was_not_compared_is_no_control(engine: EngineCore) -> None:
    replay, judge = EngineReplay(engine), Judge(TOLERANCE).judge
    whole = answers_of(engine, SAMPLED, 3)
    for changed in (
        [dataclasses.replace(one, logprobs=()) for one in whole],
        [dataclasses.replace(one, logprobs=(None, *one.logprobs[1:])) for one in whole],
        answers_of(engine, dataclasses.replace(SAMPLED, max_tokens=4), 3),
    ):
        assert not await controlled(changed, replay)

    def without_logprobs(answer: Answer, replayed: Replayed) -> Judgement:
        return judge(dataclasses.replace(answer, logprobs=()), replayed)

    assert not await controlled(answers_of(engine, GREEDY, 3), replay, without_logprobs)


async def test_the_first_answer_is_a_control_and_then_one_of_so_many(engine: EngineCore) -> None:
    ended = await controlled(answers_of(engine, SAMPLED, 11), EngineReplay(engine), every=5)
    assert ended.total() == 3


async def test_controls_teach_the_referee_nothing(engine: EngineCore) -> None:
    """Neither are their seeds those of clients, nor is what was added to logprobs rounding, nor are they verdicts."""
    answers = answers_of(engine, SAMPLED, 9)
    verdicts = []
    for every in (1, 1000):
        judge, book = Judge(TOLERANCE).judge, ReplicaBook(TOLERANCE)
        controls = Controls(EngineReplay(engine), judge, every=every)
        checker = ReplayChecker(EngineReplay(engine), judge, book, verified=controls.offer)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(one.run()) for one in (checker, controls)]
            found = [await checker.check(answer) for answer in (*answers, *answers)]
            for task in work:
                task.cancel()
        verdicts.append([(one.verdict, one.distribution, one.tme) for one in found])
        assert not book.incidents.to_wire()
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("failing", ["replay", "weights"])
async def test_what_was_not_replayed_is_not_missed(engine: EngineCore, failing: str) -> None:
    whole = EngineReplay(engine)

    async def replay(request: Request, avoid: Collection[str]) -> Replayed:
        replayed = await whole(request, avoid)
        if not request.request_id.startswith("control-"):
            return replayed
        if failing == "replay":
            raise RuntimeError("the replica is gone")
        return dataclasses.replace(replayed, weight_version="later")

    ended = await controlled(answers_of(engine, SAMPLED, 2), replay)
    assert ended.keys() <= {("logprobs", "failed"), ("token", "failed"), ("limit", "found")}
    assert bool(ended) == (failing == "replay")


def test_every_result_is_counted_from_the_start() -> None:
    sink = PrometheusSink()
    ended = count_controls(Metrics(sink, model_name="tiny", pool="prefill"))
    ended("seed", "missed")
    exposition, _ = sink.exposition()
    series = [line for line in exposition.decode().splitlines() if line.startswith("truespec_referee_controls_total{")]
    assert len(series) == len(CONTROL_CHANGES) * len(CONTROL_RESULTS)
    assert [line for line in series if line.endswith(" 1.0")] == [
        line for line in series if 'change="seed"' in line and 'result="missed"' in line
    ]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.2}, {"min_p": 0.9}], ids=str)
async def test_another_seed_is_no_control_where_filters_may_leave_one_token(
    engine: EngineCore, filters: dict[str, Any]
) -> None:
    answers = answers_of(engine, dataclasses.replace(SAMPLED, **filters), 8)
    ended = await controlled(answers, EngineReplay(engine))
    assert ended.keys() <= {(change, "found") for change in ("logprobs", "token", "limit")}


async def test_answers_with_rules_are_no_controls_of_the_rows_that_some_engines_lack(engine: EngineCore) -> None:
    whole = EngineReplay(engine)

    async def replay(request: Request, avoid: Collection[str]) -> Replayed:  # as vLLM
        replayed = await whole(request, avoid)
        return replayed if request.params.min_tokens == 0 else dataclasses.replace(replayed, replayed=None)

    ruled = dataclasses.replace(GREEDY, min_tokens=4)
    ended = await controlled([*answers_of(engine, GREEDY, 2), *answers_of(engine, ruled, 4)], replay)
    assert ended.keys() == {("logprobs", "found"), ("token", "found"), ("limit", "found")}
    assert ended["token", "found"] == 1
