"""Trips and alarms are remembered: what, where, when, how often, and no more than so many."""

from serve_app.referee.book.incidents import IncidentLog
from serve_app.referee.judge.detectors import Alarm
from tests.support.clock import Clock


def test_what_is_found_again_is_counted_and_comes_first() -> None:
    log = IncidentLog(Clock(5.0), lambda _: None)
    log.note("selfcheck", "a", "r1", at=1.0)
    log.note("selfcheck", "a", "r2", at=2.0)
    log.note("selfcheck", "a", "r1", at=3.0, num=2)
    for stratum in ("all", "accepted", "all"):
        log.note("replay", "drift", "r1", alarm=Alarm("drift", stratum, 0.0, "low"))
    found, first, second = log.to_wire()
    assert (found["strata"], found["num"], found["side"]) == (("all", "accepted"), 3, "low")
    assert (first["replica"], first["first_at"], first["at"], first["num"]) == ("r1", 1.0, 3.0, 3)
    assert (second["replica"], second["num"]) == ("r2", 1)


def test_only_the_latest_are_kept() -> None:
    log = IncidentLog(Clock(5.0), lambda _: None)
    for index in range(500):
        log.note("replay", "drift", f"r{index}")
    kept = log.to_wire()
    assert len(kept) == 40
    assert kept[0]["replica"] == "r499"
