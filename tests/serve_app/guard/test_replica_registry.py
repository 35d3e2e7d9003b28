"""What replicas report, and what is remembered of it."""

import dataclasses

import pytest

from serve_app.guard.breaker import BreakerState, Mode
from serve_app.guard.heartbeat import ReplicaStatus, Report
from serve_app.guard.referee_counts import RefereeCounts
from serve_app.guard.rehearsal import Rehearsal
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.strata import SERVED_STRATA
from serve_app.referee.judge.verdicts import Trip
from serve_app.telemetry.metrics import BufferSink, Metrics, Sink
from tests.support.clock import Clock
from tests.support.referees import TOLERANCE


@pytest.fixture
def registry(clock: Clock) -> ReplicaRegistry:
    counts = RefereeCounts(Metrics(Sink(), model_name="m", pool="decode"), SERVED_STRATA)
    return ReplicaRegistry(ReplicaBook(TOLERANCE, clock=clock), counts, clock=clock)


def status(replica: str, state: BreakerState = BreakerState.CLOSED) -> ReplicaStatus:
    return ReplicaStatus(replica, "decode", state, Mode.AUTO, 98.0, "")


def test_a_report_of_a_trip_leaves_the_trip_and_its_alarm(registry: ReplicaRegistry, clock: Clock) -> None:
    buffer = BufferSink("r1")
    metrics = Metrics(buffer, model_name="m", pool="decode")
    metrics.count("truespec_selfcheck_alarms_total", 0, check="b")
    metrics.count("truespec_selfcheck_alarms_total", 1, check="lag_g")
    metrics.count("truespec_logprob_violations_total", 4, kind="mass")
    trips = (Trip("selfcheck", 98.0, 40.0), Trip("canary", 99.0, 98.5))
    registry.on_heartbeat(Report(status("r1", BreakerState.OPEN), buffer.drain(), trips=trips))
    known = {(one["kind"], one["name"]): one for one in registry.overview()["incidents"]}
    assert set(known) == {("selfcheck", "lag_g"), ("logprobs", "mass"), ("trip", "selfcheck"), ("canary", "canary")}
    assert known["logprobs", "mass"]["num"] == 4
    assert (known["trip", "selfcheck"]["at"], known["trip", "selfcheck"]["suspect_since"]) == (98.0, 40.0)
    clock.now += 1000
    registry.on_heartbeat(Report(status("r2"), BufferSink("r2").drain()))
    assert [one["replica"] for one in registry.overview()["replicas"]] == ["r2"]
    assert {one["replica"] for one in registry.overview()["incidents"]} == {"r1"}


def test_one_replica_that_speculates_is_ordered_once_to_rehearse(registry: ReplicaRegistry) -> None:
    def is_ordered(one: ReplicaStatus) -> bool:
        return registry.on_heartbeat(Report(one, BufferSink(one.replica).drain())).rehearse

    idle = [status("r1", BreakerState.OPEN), status("r2"), dataclasses.replace(status("p"), pool="prefill")]
    assert not any(map(is_ordered, idle))
    assert registry.rehearse("r1") is registry.rehearse("p") is registry.rehearse("unknown") is None
    assert registry.rehearse(None) is not None and registry.rehearse(None) is None, "it is ordered already"
    assert [is_ordered(one) for one in idle] == [False, True, False]
    assert not is_ordered(dataclasses.replace(status("r2"), rehearsal=Rehearsal(99.0)))
    assert registry.rehearse("r2") is None, "it is under way"


def test_the_requests_that_a_replica_had_are_known_while_it_is_remembered(
    registry: ReplicaRegistry, clock: Clock
) -> None:
    buffer = BufferSink("r1")
    metrics = Metrics(buffer, model_name="m", pool="decode")
    metrics.gauge("truespec_requests_in_flight", 3, stage="prefill")
    metrics.gauge("truespec_requests_in_flight", 2, stage="decode")
    metrics.gauge("truespec_replays_running", 7)
    registry.on_heartbeat(Report(status("r1"), buffer.drain()))
    router = BufferSink("router")
    Metrics(router, model_name="m", pool="router").gauge("truespec_requests_in_flight", 4, stage="decode")
    registry.note_requests(router.drain())
    on = {"r1": {"prefill": 3, "decode": 2}, "router": {"decode": 4}, "r2": {}}
    assert {name: registry.requests_on(name) for name in on} == on
    clock.now += 1000
    registry.note_requests(buffer.drain())
    assert [registry.requests_on(name) for name in ("r1", "router")] == [on["r1"], {}]
