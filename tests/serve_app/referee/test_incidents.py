"""Trips and alarms are remembered: what, where, when, how often, and no more than so many."""

import pytest

from serve_app.referee.breaker import BreakerState, Mode, Trip
from serve_app.referee.heartbeat import ReplicaStatus, Report
from serve_app.referee.incidents import IncidentLog
from serve_app.referee.replica_book import ReplicaBook
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink
from speculative.stats import CLIENTS_FAULT
from tests.support.clock import Clock
from tests.support.referees import TOLERANCE


@pytest.fixture
def log() -> IncidentLog:
    return IncidentLog(Clock(5.0))


def test_what_is_found_again_is_counted_and_comes_first(log: IncidentLog) -> None:
    log.note("selfcheck", "a", "r1", at=1.0)
    log.note("selfcheck", "a", "r2", at=2.0)
    log.note("selfcheck", "a", "r1", at=3.0, num=2)
    first, second = log.to_wire()
    assert (first["replica"], first["first_at"], first["at"], first["num"]) == ("r1", 1.0, 3.0, 3)
    assert (second["replica"], second["num"]) == ("r2", 1)


def test_a_finding_in_several_strata_is_one(log: IncidentLog) -> None:
    for stratum in ("all", "accepted", "all"):
        log.note("replay", "drift", "r1", strata=(stratum,))
    (found,) = log.to_wire()
    assert (found["strata"], found["num"]) == (("all", "accepted"), 3)


def test_only_the_latest_are_kept(log: IncidentLog) -> None:
    for index in range(500):
        log.note("replay", "drift", f"r{index}")
    kept = log.to_wire()
    assert len(kept) == 40
    assert kept[0]["replica"] == "r499"


def test_a_report_of_a_trip_leaves_the_trip_and_its_alarm(log: IncidentLog) -> None:
    buffer, clock = BufferSink("r1"), Clock(100.0)
    metrics = Metrics([buffer], model_name="m", pool="decode")
    book = ReplicaBook(Metrics([PrometheusSink()], model_name="m", pool="decode"), TOLERANCE, clock=clock)
    metrics.count("truespec_selfcheck_alarms_total", 0, check="b")
    metrics.count("truespec_selfcheck_alarms_total", 1, check="lag_g")
    metrics.count("truespec_selfcheck_violations_total", 1, kind=CLIENTS_FAULT)
    metrics.count("truespec_logprob_violations_total", 4, kind="mass")
    status = ReplicaStatus("r1", "decode", BreakerState.OPEN, Mode.AUTO, 98.0, "selfcheck")
    book.hear(Report(status, buffer.drain(), trips=(Trip("selfcheck", 98.0, 40.0), Trip("canary", 99.0, 98.5))))
    known = {(one["kind"], one["name"]): one for one in book.overview()["incidents"]}
    assert set(known) == {("selfcheck", "lag_g"), ("logprobs", "mass"), ("trip", "selfcheck"), ("canary", "canary")}
    assert known["logprobs", "mass"]["num"] == 4
    assert (known["trip", "selfcheck"]["at"], known["trip", "selfcheck"]["suspect_since"]) == (98.0, 40.0)
    clock.now += 1000
    book.hear(Report(ReplicaStatus("r2", "decode", BreakerState.CLOSED, Mode.AUTO, 0.0, ""), BufferSink("r2").drain()))
    assert [one["replica"] for one in book.overview()["replicas"]] == ["r2"]
    assert {one["replica"] for one in book.overview()["incidents"]} == {"r1"}
