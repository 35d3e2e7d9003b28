"""When a replica speculates, when it does not, and when it is to go."""

import pytest

from serve_app.config.app_config import BreakerSection
from serve_app.guard.breaker import Breaker, BreakerState, Mode
from speculative.request import Speculation
from tests.support.clock import Clock

SETTINGS = BreakerSection(cooldown_s=10, window_s=100, suspect_s=30)


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(SETTINGS, clock)


def trip(breaker: Breaker, clock: Clock, reason: str = "drift") -> bool:
    clock.now += 1
    return breaker.trip(reason, clock.now, clock.now) is not None


def closed_again(breaker: Breaker, clock: Clock) -> None:
    clock.now += SETTINGS.cooldown_s
    assert breaker.canary_due
    breaker.begin_canary()
    assert (breaker.state, breaker.speculation) == (BreakerState.CANARY, Speculation.CANARY)
    assert not breaker.canary_due
    breaker.end_canary(passed=True)
    assert (breaker.state, breaker.speculation) == (BreakerState.CLOSED, Speculation.ON)


def test_each_failed_canary_doubles_the_wait_and_one_that_shows_nothing_does_not(
    breaker: Breaker, clock: Clock
) -> None:
    trip(breaker, clock)
    waits = []
    for passed in (False, None, False, False, False, False, False):
        before = clock.now
        while not breaker.canary_due:
            clock.now += 1
        waits.append(clock.now - before)
        breaker.begin_canary()
        breaker.end_canary(passed=passed)
        assert breaker.state is BreakerState.OPEN
    assert waits == [10, 20, 20, 40, 80, 160, 160]


def test_a_second_trip_within_the_window_takes_the_replica_out(breaker: Breaker, clock: Clock) -> None:
    trip(breaker, clock)
    closed_again(breaker, clock)
    clock.now += 100
    assert trip(breaker, clock)
    assert breaker.state is BreakerState.OPEN, "the first is forgotten"
    closed_again(breaker, clock)
    clock.now += 50
    assert trip(breaker, clock, "selfcheck")
    assert breaker.out_of_service
    assert breaker.speculation is Speculation.OFF
    assert breaker.reason == "selfcheck"
    assert not trip(breaker, clock), "it is out already"


def test_a_rehearsal_opens_it_and_is_no_trip(breaker: Breaker, clock: Clock) -> None:
    breaker.rehearse()
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, "rehearsal")
    assert trip(breaker, clock)
    assert breaker.state is BreakerState.OPEN, "a fault meanwhile is a first one"
    closed_again(breaker, clock)
    breaker.rehearse()
    closed_again(breaker, clock)
    assert trip(breaker, clock) and breaker.out_of_service
    patient = Breaker(BreakerSection(cooldown_s=600), clock)
    patient.rehearse()
    clock.now += 15
    assert patient.canary_due, "it lasts less than a minute"


def test_evidence_from_before_a_change_counts_no_more(breaker: Breaker, clock: Clock) -> None:
    began = clock.now + 1
    clock.now += 5
    trip(breaker, clock)
    clock.now += 1
    assert breaker.trip("drift", began, began) is None
    assert breaker.state is BreakerState.OPEN
    closed_again(breaker, clock)
    assert breaker.trip("drift", began, began) is None
    assert breaker.state is BreakerState.CLOSED


def test_what_shows_during_a_canary_fails_it_and_costs_the_replica_no_more(breaker: Breaker, clock: Clock) -> None:
    trip(breaker, clock)
    clock.now += 10
    breaker.begin_canary()
    clock.now += 3
    failed = breaker.trip("drift", clock.now, clock.now)
    assert failed is not None
    assert (failed.reason, failed.suspect_since, failed.at) == ("canary", clock.now - 3, clock.now)
    assert breaker.state is BreakerState.OPEN
    assert breaker.trip("drift", clock.now - 1, clock.now - 1) is None, "it was made beside the canary"
    assert breaker.end_canary(passed=True) is None
    assert breaker.state is BreakerState.OPEN, "a canary that ends late brings nothing back"
    clock.now += 20
    assert breaker.canary_due
    breaker.begin_canary()
    assert breaker.end_canary(passed=True) is None
    assert breaker.state is BreakerState.CLOSED


def test_what_ended_since_the_evidence_began_is_suspect(breaker: Breaker, clock: Clock) -> None:
    clock.now += 500
    made = breaker.trip("drift", shown_at=clock.now - 1, evidence_since=clock.now - 400)
    assert made is not None and made.suspect_since == clock.now - 400
    closed_again(breaker, clock)
    clock.now += 500
    young = breaker.trip("drift", shown_at=clock.now - 1, evidence_since=clock.now - 2)
    assert young is not None and young.suspect_since == clock.now - SETTINGS.suspect_s
    closed_again(breaker, clock)
    clock.now += 500
    old = breaker.trip("drift", shown_at=clock.now - 1, evidence_since=0.0)
    assert old is not None and old.suspect_since == 1000, "not before the replica began"


def test_an_operators_word_stands_above_the_breaker(breaker: Breaker, clock: Clock) -> None:
    breaker.set_mode(Mode.OFF)
    assert breaker.speculation is Speculation.OFF
    trip(breaker, clock)
    clock.now += 1000
    assert not breaker.canary_due
    breaker.set_mode(Mode.AUTO)
    assert breaker.canary_due, "the trip was not forgotten"
    breaker.set_mode(Mode.ON)
    assert (breaker.state, breaker.speculation) == (BreakerState.CLOSED, Speculation.ON)
