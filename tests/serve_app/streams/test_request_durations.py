"""Durations of requests, by a clock that the test moves."""

import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest

from serve_app.referee.records import Records
from serve_app.referee.replay_selection import Selection
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from speculative.errors import EngineFault
from speculative.request import FinishReason, Request, TokenDelta
from tests.support.clock import Clock

REQUEST = Request("r-1", (1, 2, 3, 4))
FIRST, MORE = TokenDelta("r-1", (7,), queue_s=0.5), TokenDelta("r-1", (8, 9))
MEASURES = {"request_duration_seconds", "queue_time_seconds"}


class Timed:
    """A source whose deltas come at given seconds; an error ends it."""

    def __init__(self, clock: Clock, deltas: Sequence[tuple[float, TokenDelta | Exception]]) -> None:
        self._clock, self._deltas = clock, deltas
        self.aborted: list[str] = []

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        began = self._clock.now
        for at, delta in self._deltas:
            self._clock.now = began + at
            if isinstance(delta, Exception):
                raise delta
            yield delta
        self._clock.now += 100  # the client is slow to ask whether there is more

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


async def measured(*deltas: tuple[float, TokenDelta | Exception], stop_after: int | None = None) -> dict[str, float]:
    """The sum of each histogram that observed anything."""
    clock, sink = Clock(), PrometheusSink()
    source = ObservedSource(
        Timed(clock, deltas),
        Metrics([sink], model_name="m", pool="decode"),
        Records("r1", 100),
        select=lambda _: Selection.NOT_CHECKED,
        ended=lambda record, answer: None,
        limits=SourceLimits(4, timeout_s=300),
        clock=clock,
    )
    num = 0
    async with contextlib.aclosing(source.stream([REQUEST])) as arriving:
        async for _ in arriving:
            num += 1
            if num == stop_after:
                await source.abort("r-1")
                break
    found = {name: sink.histogram(f"truespec_{name}") for name in MEASURES}
    assert all(sum(one.counts) <= 1 for one in found.values())
    return {name: one.total for name, one in found.items() if sum(one.counts)}


async def test_a_request_is_measured_from_its_arrival_to_its_last_token() -> None:
    last = TokenDelta("r-1", (10, 11), finish_reason=FinishReason.LENGTH)
    assert await measured((2.0, FIRST), (3.0, MORE), (6.0, last)) == {
        "request_duration_seconds": 6.0,
        "queue_time_seconds": 0.5,
    }


async def test_an_end_that_comes_by_itself_belongs_to_the_request() -> None:
    found = await measured((2.0, FIRST), (3.0, TokenDelta("r-1", finish_reason=FinishReason.STOP)))
    assert found["request_duration_seconds"] == 3.0


async def test_what_the_front_end_stops_is_an_answer_too() -> None:
    found = await measured((2.0, FIRST), (4.0, MORE), (9.0, MORE), stop_after=2)
    assert found["request_duration_seconds"] == 4.0


@pytest.mark.parametrize(
    "end", [TokenDelta("r-1", finish_reason=FinishReason.ERROR), TokenDelta("r-1", finish_reason=FinishReason.ABORT)]
)
async def test_what_fails_or_is_left_is_not_measured(end: TokenDelta) -> None:
    assert (await measured((2.0, FIRST), (3.0, end))).keys() == {"queue_time_seconds"}


async def test_what_breaks_off_is_not_measured() -> None:
    with pytest.raises(EngineFault):
        await measured((2.0, FIRST), (3.0, EngineFault("dead")))
