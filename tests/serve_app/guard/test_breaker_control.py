"""The guard over a fake engine: evidence in, deeds out, and a canary that tries speculation on real requests."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.backends.rehearsed_fault import load_rehearsing
from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.config.app_config import BreakerSection
from serve_app.errors import dead_end
from serve_app.guard import rehearsal
from serve_app.guard.breaker import Breaker, BreakerState, Mode
from serve_app.guard.breaker_control import BreakerController
from serve_app.guard.canary import Canary
from serve_app.guard.heartbeat import Orders
from serve_app.guard.rehearsal import Rehearsal, Rehearsing
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import Finding, ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.records import Records
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics, Sink
from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import EngineFault
from speculative.request import Request, SamplingParams, Speculation, TokenDelta
from speculative.stats import CheckState, Evidence, StepStats
from tests.support.engines import NGRAM, answer_all, settings
from tests.support.fake_backend import FakeBackend, FakeConfig
from tests.support.referees import TOLERANCE
from tests.support.tiny_models import write_tiny_model

ALARM = StepStats(alarms={"f": 1}, evidence=(Evidence(Request("r", (1,))),))


class Replica:
    """A guard, the fake engine it guards, and a judge that answers what a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.backend = FakeBackend(FakeConfig())
        self.buffer = BufferSink("r1")
        metrics = Metrics(self.buffer, model_name="fake", pool="decode")
        self.breaker = Breaker(BreakerSection(cooldown_s=10, window_s=100, suspect_s=30), lambda: self.now)
        self.verdict: Verdict | Exception = Verdict.VERIFIED
        self.judged: list[Answer] = []
        self.canary = Canary(PooledTokenSource(self.backend, metrics), Records("r1", 256), self.judge, num_requests=3)
        self.breaker_controller = BreakerController(
            ("r1", "decode"), self.backend, self.breaker, metrics, self.canary.try_out, lambda: self.now
        )

    async def judge(self, answer: Answer) -> Checked:
        self.judged.append(answer)
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return Checked(self.verdict, "set by the test")

    def count(self, name: str, **labels: str) -> float:
        wanted = set(labels.values())
        counters = self.buffer.drain().counters
        return sum(value for (metric, values), value in counters.items() if metric == name and wanted <= set(values))

    def step(self, stats: StepStats | None = None, *, later: float = 1.0) -> None:
        self.now += later
        self.breaker_controller.inspect(stats or StepStats())
        self.breaker_controller.act()

    async def canary_over(self) -> None:
        for _ in range(500):
            if self.breaker.state is not BreakerState.CANARY:
                return
            await asyncio.sleep(0.002)
        raise AssertionError("the canary does not end")


@pytest.fixture
async def replica() -> Replica:
    made = Replica()
    await made.backend.start()
    return made


async def test_an_alarm_of_the_engine_stops_speculation_and_drops_what_was_computed(replica: Replica) -> None:
    assert replica.backend.speculation is Speculation.ON
    replica.step(ALARM)
    assert replica.backend.speculation is Speculation.OFF
    assert replica.backend.num_distrusted == 1
    (trip,) = replica.breaker_controller.take_trips()
    assert (trip.reason, trip.at) == ("selfcheck", 1001.0)
    assert replica.breaker_controller.take_trips() == ()
    assert replica.breaker_controller.status.breaker is BreakerState.OPEN
    assert replica.count("truespec_breaker_trips_total", reason="selfcheck") == 1
    replica.breaker_controller.check_health()


async def test_answers_are_suspect_since_the_evidence_of_the_check_that_alarmed_began(replica: Replica) -> None:
    (check,) = ALARM.alarms
    states = [
        CheckState(name, 10, 0.1, 9.0, 20.0, 14.0, 1, since) for name, since in ((check, 1300.0), ("another", 1100.0))
    ]
    replica.now = 2000.0
    replica.breaker_controller.inspect(ALARM, states)
    (trip,) = replica.breaker_controller.take_trips()
    assert trip.suspect_since == 1300.0


async def test_alarms_that_were_on_their_way_at_the_trip_are_not_a_second_one(replica: Replica) -> None:
    replica.step(ALARM)
    replica.step(ALARM)
    assert replica.breaker_controller.status.breaker is BreakerState.OPEN
    replica.step(ALARM)
    assert replica.breaker_controller.status.breaker is BreakerState.OUT, "it goes on without speculation"
    with pytest.raises(EngineFault, match="must be replaced"):
        replica.breaker_controller.check_health()


@pytest.mark.parametrize(
    ("stats", "reason"),
    [
        (StepStats(violations={"p_zero": 1}), "invariant"),
        (StepStats(logprob_violations={"mass": 1}), "logprobs"),
        (StepStats(violations={"not_finite": 1}), "invariant"),
        (StepStats(), None),
    ],
)
async def test_broken_rules_trip_but_no_client_can(replica: Replica, stats: StepStats, reason: str | None) -> None:
    replica.step(stats)
    assert [trip.reason for trip in replica.breaker_controller.take_trips()] == ([] if reason is None else [reason])


@pytest.mark.parametrize(("alarm", "reason"), [("drift", "drift"), ("surprisal", "law"), ("support", "law")])
async def test_what_the_referee_finds_trips(replica: Replica, alarm: str, reason: str) -> None:
    replica.now = 2000.0
    replica.breaker_controller.apply(Orders((Finding("r1", alarm, "all", began_at=1990.0, evidence_since=1500.0),)))
    (trip,) = replica.breaker_controller.take_trips()
    assert (trip.reason, trip.suspect_since) == (reason, 1500.0)
    assert replica.backend.speculation is Speculation.OFF


async def test_trips_that_could_not_be_reported_are_reported_later(replica: Replica) -> None:
    replica.step(ALARM)
    taken = replica.breaker_controller.take_trips()
    replica.breaker_controller.put_back(taken)
    assert replica.breaker_controller.take_trips() == taken


async def test_a_canary_of_late_requests_brings_speculation_back(replica: Replica) -> None:
    for number in range(5):
        replica.canary.remember(
            Request(
                f"r-{number}", (number + 1, 7), SamplingParams(max_tokens=100, temperature=0.5, prompt_logprobs=1), 9
            )
        )
    replica.canary.remember(Request("plain", (50, 51), SamplingParams(speculate=False)))
    replica.step(ALARM)
    replica.step(later=10)
    assert replica.backend.speculation is Speculation.CANARY
    beside = [delta async for delta in replica.backend.generate(Request("client", (1, 2)))]
    assert sum(delta.num_drafted for delta in beside) == 0, "clients are served plainly meanwhile"
    await replica.canary_over()
    assert replica.backend.speculation is Speculation.ON
    assert [answer.request.prompt_token_ids[0] for answer in replica.judged] == [3, 4, 5]
    assert [answer.request.params.temperature for answer in replica.judged] == [0.0, 0.5, 0.0], (
        "every other one is greedy"
    )
    assert all(answer.request.canary for answer in replica.judged)
    assert all(answer.num_drafted > 0 for answer in replica.judged[::2]), "what is greedy here repeats itself"
    assert all(answer.request.seed != 9 for answer in replica.judged), "an old seed would draw the same numbers again"
    assert all(answer.request.params.max_tokens <= 48 for answer in replica.judged)
    assert len({answer.request.request_id for answer in replica.judged}) == 3
    assert replica.backend.num_distrusted == 1
    assert replica.count("truespec_canaries_total", result="passed") == 1


async def test_a_request_that_its_own_rules_end_says_nothing_of_speculation(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was well when a client asked for less; as a canary it goes on until nothing is allowed."""
    replica.canary.remember(Request("r", (1, 2), SamplingParams(max_tokens=2, allowed_token_ids=(5,))))
    generate = replica.backend.generate

    async def generated(request: Request, *args: Any) -> AsyncGenerator[TokenDelta, None]:
        if request.params.allowed_token_ids:
            raise dead_end(request.params)
        async with contextlib.aclosing(generate(request, *args)) as deltas:
            async for delta in deltas:
                yield delta

    monkeypatch.setattr(replica.backend, "generate", generated)
    replica.step(ALARM)
    replica.step(later=10)
    await replica.canary_over()
    assert replica.backend.speculation is Speculation.ON
    assert replica.count("truespec_canaries_total", result="passed") == 1


@pytest.mark.parametrize(
    ("verdict", "result"),
    [
        (Verdict.SUSPECT, "failed"),
        (Verdict.UNVERIFIED, "inconclusive"),
        (ConnectionError("no referee"), "inconclusive"),
    ],
)
async def test_a_canary_that_does_not_pass_leaves_speculation_off(
    replica: Replica, verdict: Verdict | Exception, result: str
) -> None:
    replica.verdict = verdict
    replica.step(ALARM)
    replica.step(later=10)
    await replica.canary_over()
    assert replica.backend.speculation is Speculation.OFF
    assert replica.breaker_controller.status.breaker is BreakerState.OPEN
    assert replica.backend.num_distrusted == 2
    assert replica.count("truespec_canaries_total", result=result) == 1
    assert replica.backend.num_live == 0


@pytest.mark.parametrize(("min_drafted", "passed", "most"), [(1, True, 2), (10**6, None, 8), (0, True, 2)])
async def test_a_canary_that_drafted_too_little_goes_on_and_then_has_shown_nothing(
    replica: Replica, min_drafted: int, passed: bool | None, most: int
) -> None:
    source = PooledTokenSource(replica.backend, Metrics(Sink(), model_name="fake", pool="decode"))
    canary = Canary(source, Records("r1", 256), replica.judge, 2, min_drafted)
    assert await canary.try_out() is passed
    assert len(replica.judged) == most


async def test_an_alarm_during_a_canary_fails_it(replica: Replica) -> None:
    replica.step(ALARM)
    replica.step(later=10)
    assert replica.breaker_controller.status.breaker is BreakerState.CANARY
    replica.step(ALARM)
    assert replica.backend.speculation is Speculation.OFF
    for _ in range(200):
        await asyncio.sleep(0.002)
    assert replica.breaker_controller.status.breaker is BreakerState.OPEN
    assert replica.count("truespec_canaries_total", result="failed") == 1
    trips = replica.breaker_controller.take_trips()
    assert [trip.reason for trip in trips] == ["selfcheck", "canary"]
    assert all(trip.evidence == ALARM.evidence for trip in trips)
    assert replica.count("truespec_breaker_trips_total") == 0, "the first was counted before, a canary is no trip"


async def test_an_operator_who_forces_speculation_on_during_a_canary_has_not_found_it_wrong(replica: Replica) -> None:
    replica.step(ALARM)
    replica.step(later=10)
    assert replica.breaker_controller.status.breaker is BreakerState.CANARY
    replica.breaker_controller.apply(Orders(mode=Mode.ON))
    replica.breaker_controller.act()
    assert replica.breaker_controller.status.breaker is BreakerState.CLOSED
    for _ in range(200):
        await asyncio.sleep(0.002)
    canaries = {labels[-1]: n for (name, labels), n in replica.buffer.drain().counters.items() if "canaries" in name}
    assert canaries == {"passed": 0, "failed": 0, "inconclusive": 1}
    assert replica.backend.num_distrusted == 1, "at the trip"
    assert [trip.reason for trip in replica.breaker_controller.take_trips()] == ["selfcheck"]
    assert replica.breaker_controller.status.breaker is BreakerState.CLOSED


async def test_an_operator_switches_speculation(replica: Replica) -> None:
    for mode, speculation in ((Mode.OFF, Speculation.OFF), (Mode.ON, Speculation.ON), (Mode.AUTO, Speculation.ON)):
        replica.breaker_controller.apply(Orders(mode=mode))
        replica.breaker_controller.act()
        assert replica.backend.speculation is speculation
        assert replica.breaker_controller.status.mode is mode
    replica.breaker_controller.apply(Orders(mode=Mode.ON))
    replica.step()
    for _ in range(3):
        replica.step(ALARM)
    assert replica.backend.speculation is Speculation.ON and replica.backend.num_distrusted == 0, "it is counted only"
    replica.breaker_controller.check_health()
    assert len(replica.breaker_controller.take_trips()) == 3


# ---- a rehearsed fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("rehearsed"), vocab_size=64)


def test_beside_a_rehearsed_request_others_are_computed_as_ever_to_the_bit(folder: Path) -> None:
    def answered(load: Callable[..., EngineCore], *requests: Request) -> dict[str, list[TokenDelta]]:
        found = answer_all(load(folder, settings()), requests)
        return {name: [delta._replace(queue_s=0.0) for delta in one.deltas] for name, one in found.items()}

    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    greedy = dataclasses.replace(params, temperature=0.0)
    clients = [Request("a", (3, 4, 5) * 4, params, 1), Request("b", (7, 8) * 5, greedy, 2)]
    own = Request("own", (9, 10, 9, 11) * 3, params, 3)
    honest = answered(load_engine, *clients, own)
    assert answered(load_rehearsing, *clients, own) == honest, "nothing is rehearsed"
    rehearsed = answered(load_rehearsing, *clients, dataclasses.replace(own, rehearsal=True))
    assert rehearsed.pop("own") != honest.pop("own")
    assert rehearsed == honest


class Rehearsed:
    """A replica that may rehearse, and a referee that replays on it."""

    def __init__(self, folder: Path, drafter: DrafterConfig) -> None:
        self.backend = TorchBackend(str(folder), "tiny", settings(drafter=drafter, max_num_seqs=4), load_rehearsing)
        self.book, metrics = ReplicaBook(TOLERANCE), Metrics(Sink(), model_name="tiny", pool="decode")
        self.checker = ReplayChecker(lambda one, avoid: self.backend.replay(one), Judge(TOLERANCE).judge, self.book)
        source, records = PooledTokenSource(self.backend, metrics), Records("r1", 512, 8)
        self.canary = Canary(source, records, self.checker.check, 2)
        breaker = Breaker(BreakerSection(cooldown_s=3.0), time.time)
        self.control = BreakerController(("r1", "decode"), self.backend, breaker, metrics, self.canary.try_out)

    async def rehearse(self) -> Rehearsal:
        await Rehearsing(self.canary, self.control.note_rehearsal, self.control.rehearse).run()
        assert self.control.status.rehearsal is not None
        return self.control.status.rehearsal


@pytest.fixture(params=["ngram", "draft model"])
async def rehearsed(folder: Path, request: pytest.FixtureRequest) -> AsyncGenerator[Rehearsed, None]:
    drafter = NGRAM
    if request.param == "draft model":  # drafts where it pays, and now and then more than the model's at once
        model = str(write_tiny_model(folder / "other", vocab_size=64, seed=9))
        drafter = DrafterConfig.of(
            kind="draft_model", model=model, num_draft_tokens=3, length="dynamic", suffix_first=8
        )
    made = Rehearsed(folder, drafter)
    await made.backend.start()
    work = asyncio.create_task(made.checker.run())
    yield made
    work.cancel()
    await made.backend.stop()


async def test_the_referee_finds_the_fault_and_speculation_is_off_until_a_canary_passes(rehearsed: Rehearsed) -> None:
    ended, control = await rehearsed.rehearse(), rehearsed.control
    assert (ended.state, ended.num_verified) == ("found", 2) and ended.num_tokens in (48, 96)
    assert ended.found_by in ("draws", "likeliest", "distribution") and ended.began_at <= ended.found_at
    assert (control.status.breaker, control.status.reason) == (BreakerState.OPEN, "rehearsal")
    assert control.take_trips() == (), "no client's answer is suspect"
    shown = rehearsed.book.overview()
    assert shown["incidents"] == [] and shown["latest"][0]["verdict"] == "suspect"
    assert all(one["reason"].startswith("rehearsed: ") for one in shown["latest"])
    async with asyncio.timeout(60):
        while control.status.breaker is not BreakerState.CLOSED:
            control.act()
            await asyncio.sleep(0.05)


async def test_what_nobody_notices_is_missed(rehearsed: Rehearsed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_LONGEST_S", 0.5)
    rehearsed.canary.judge = None  # the referee sees nothing
    assert (await rehearsed.rehearse()).state == "missed"
    assert rehearsed.control.status.breaker is BreakerState.CLOSED
