"""Answers that were selected for a replay and are not handed in: found by length and replica, and never falsely."""

from collections.abc import Callable

import pytest

from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Finished
from serve_app.referee.records.coverage import Coverage
from serve_app.referee.records.replay_selection import chosen
from speculative.request import Request, SamplingParams
from tests.support.clock import Clock

SHARE = 0.1
Left = Callable[[int, Finished], bool]


class Service:
    """Two replicas that answer a request a second, one in ten of which is selected."""

    def __init__(self) -> None:
        self.clock, self.missed = Clock(0.0), list[tuple[str, Finished]]()
        self.coverage = Coverage(SHARE, 600.0, lambda *missed: self.missed.append(missed), self.clock)
        self.num_selected = 0

    def serve(self, num: int, left_out: Left) -> None:
        for number in range(num):
            self.clock.now += 1.0
            one = Finished(f"cmpl-{self.clock.now}-0", 0.0, 1.0, num_tokens=(number * 7) % 90)
            self.coverage.finished(f"r{number % 2}", [one])
            if chosen(f"cmpl-{self.clock.now}", SHARE):
                self.num_selected += 1
                if not left_out(number, one):
                    request = Request(one.request_id, (1,), SamplingParams())
                    self.coverage.came(Answer.reported(request, "r", (2,), (), ()))


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.mark.parametrize(
    "left_out",
    [
        lambda number, one: one.num_tokens > 24,
        lambda number, one: one.num_tokens > 63,
        lambda number, one: number % 2 == 1,
        lambda number, one: number % 3 == 0,
    ],
    ids=["long", "longest", "one replica's", "a third"],
)
def test_what_is_left_out_is_found(service: Service, left_out: Left) -> None:
    service.serve(1500, left_out)
    assert service.missed and service.num_selected < 200


def test_what_can_be_lost_raises_no_alarm(service: Service) -> None:
    """Single answers, those without tokens, and replies that are held up for as long as a request may run."""
    service.serve(20_000, lambda number, one: number % 1000 == 0 or not one.num_tokens)
    waiting = [Finished(f"cmpl-w{number}-0", 0.0, 1.0, num_tokens=9) for number in range(200)]
    service.coverage.finished("r0", waiting)
    service.serve(590, lambda number, one: False)
    for one in waiting:
        service.coverage.came(Answer.reported(Request(one.request_id, (1,), SamplingParams()), "r", (2,), (), ()))
    service.serve(100, lambda number, one: False)
    assert service.missed == []
