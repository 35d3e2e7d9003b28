"""Durations of requests, by a clock that the test moves."""

import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest

from serve_app.telemetry.metrics import Metrics, PrometheusSink
from speculative.request import FinishReason, Request, TokenDelta
from tests.support.clock import Clock
from tests.support.front_ends import observed

REQUEST = Request("r-1", (1, 2, 3, 4))
FIRST, MORE = TokenDelta("r-1", (7,), queue_s=0.5), TokenDelta("r-1", (8, 9))
MEASURES = {"request_duration_seconds", "queue_time_seconds"}


class Timed:
    """A source whose deltas come at given seconds."""

    def __init__(self, clock: Clock, deltas: Sequence[tuple[float, TokenDelta]]) -> None:
        self._clock, self._deltas = clock, deltas
        self.aborted: list[str] = []

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        began = self._clock.now
        for at, delta in self._deltas:
            self._clock.now = began + at
            yield delta
        self._clock.now += 100  # the client is slow to ask whether there is more

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


async def measured(*deltas: tuple[float, TokenDelta], stop_after: int | None = None) -> dict[str, float]:
    """The sum of each histogram that observed anything."""
    clock, sink = Clock(), PrometheusSink()
    source = observed(Timed(clock, deltas), Metrics(sink, model_name="m", pool="decode"), clock=clock)
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


def ended(reason: FinishReason, *tokens: int) -> TokenDelta:
    return TokenDelta("r-1", tokens, finish_reason=reason)


@pytest.mark.parametrize(
    ("deltas", "stop_after", "duration_s"),
    [
        ([(2.0, FIRST), (3.0, MORE), (6.0, ended(FinishReason.LENGTH, 10, 11))], None, 6.0),
        ([(2.0, FIRST), (3.0, ended(FinishReason.STOP))], None, 3.0),
        ([(2.0, FIRST), (4.0, MORE), (9.0, MORE)], 2, 4.0),
        ([(2.0, FIRST), (3.0, ended(FinishReason.ERROR))], None, None),
        ([(2.0, FIRST), (3.0, ended(FinishReason.ABORT))], None, None),
    ],
    ids=["to its last token", "an end by itself", "stopped by the front end", "failed", "left"],
)
async def test_a_request_is_measured_from_its_arrival_if_it_is_answered(
    deltas: list[tuple[float, TokenDelta]], stop_after: int | None, duration_s: float | None
) -> None:
    duration = {} if duration_s is None else {"request_duration_seconds": duration_s}
    assert await measured(*deltas, stop_after=stop_after) == {**duration, "queue_time_seconds": 0.5}
