"""What is let in: the backlog's estimate, limits of the queue, and deadlines; clocks go as the tests say."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from starlette.types import Message

from serve_app.config.files import load_config
from serve_app.errors import NoRoom, reply_for
from serve_app.http.access.access import Access
from serve_app.http.access.request_gate import Gate
from serve_app.http.routes import build_ingress
from serve_app.streams.backlog import Backlog, Returns
from serve_app.streams.in_flight import InFlight
from serve_app.streams.observed import SourceLimits
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault, EngineOverloaded, InvalidRequest, RequestTimeout
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta
from tests.support.clock import Clock
from tests.support.front_ends import counts_by, front_end, in_flight, observed
from tests.support.waiting import until

COST = 64  # what a prompt costs beside its tokens, in tokens


# ---- the backlog


def test_nothing_is_estimated_before_anything_was_measured(clock: Clock) -> None:
    backlog = Backlog(clock)
    assert backlog.wait_s() == 0
    ticket = backlog.join(100)
    clock.now += 5
    assert backlog.wait_s() is None
    ticket.close(served=True)
    assert backlog.wait_s() == 0


def test_the_estimate_is_the_backlog_over_the_measured_rate(clock: Clock) -> None:
    backlog = Backlog(clock)
    for _ in range(200):  # a prompt of 36 tokens a second, one after the other
        ticket = backlog.join(36)
        clock.now += 1
        ticket.close(served=True)
        clock.now += 100  # idle time does not count
    waiting = [backlog.join(36) for _ in range(5)]
    assert backlog.wait_s() == pytest.approx(5, rel=0.05)
    waiting.append(backlog.join(10 * (36 + COST) - COST))
    assert backlog.num_tokens() == 5 * 36 + 936
    assert backlog.wait_s() == pytest.approx(15, rel=0.05)
    before = backlog.wait_s() or 0
    clock.now += 10  # nothing moves
    assert (backlog.wait_s() or 0) > 1.5 * before
    for ticket in waiting:
        ticket.close(served=False)
        ticket.close(served=True)
    assert (backlog.num_tokens(), backlog.wait_s()) == (0, 0)


def test_the_estimate_follows_a_change_of_speed(clock: Clock) -> None:
    backlog = Backlog(clock)
    for seconds in (0.01, 1.0):
        for _ in range(200):
            ticket = backlog.join(100)
            clock.now += seconds
            ticket.close(served=True)
    backlog.join(100)
    assert backlog.wait_s() == pytest.approx(1, rel=0.1)


# ---- the source


class Slow:
    """A source that gives a token when a test says so, and knows what is not closed."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Queue[TokenDelta | None]] = {}
        self.started = 0

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        queue: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        names = [request.request_id for request in requests]
        self.open |= dict.fromkeys(names, queue)
        self.started += 1
        try:
            while (delta := await queue.get()) is not None:
                yield delta
        finally:
            for name in names:
                del self.open[name]

    async def abort(self, request_id: str) -> None:
        raise AssertionError("nobody aborts here")

    def give(self, name: str, finish: FinishReason | None = None) -> None:
        self.open[name].put_nowait(TokenDelta(name, (5,), finish_reason=finish))


class Watched:
    def __init__(self, clock: Clock, **limits: float) -> None:
        self.slow = Slow()
        self.sink = PrometheusSink()
        self.clock = clock
        metrics = Metrics(self.sink, model_name="m", pool="decode")
        own = SourceLimits(**{"max_running": 8, "timeout_s": 60.0} | limits)  # type: ignore[arg-type]
        self.source = observed(self.slow, metrics, own, clock=clock)
        self.tasks: dict[str, asyncio.Task[int]] = {}

    async def begin(self, name: str, num_tokens: int = 36, *, choices: int = 1, timeout_s: float | None = None) -> None:
        """Start a request, and wait until the source has it or it ended."""
        prompt, params = (7,) * num_tokens, SamplingParams(max_tokens=50)
        names = [name, *(f"{name}.{index}" for index in range(1, choices))]
        requests = [Request(one, prompt, params, timeout_s=timeout_s) for one in names]

        async def run() -> int:
            async with aclosing(self.source.stream(requests)) as deltas:
                return sum([len(delta.token_ids) async for delta in deltas])

        started = self.slow.started
        task = self.tasks[name] = asyncio.create_task(run())
        while self.slow.started == started and not task.done():
            await asyncio.sleep(0)

    async def serve(self, name: str, seconds: float) -> None:
        """Have a request's first token come after so long, and its end."""
        self.clock.now += seconds
        self.slow.give(name, FinishReason.LENGTH)
        self.slow.open[name].put_nowait(None)
        assert await self.tasks[name] == 1

    def refusals(self) -> dict[str, float]:
        return counts_by(self.sink, "refusals", "reason")

    def outcomes(self) -> dict[str, float]:
        return counts_by(self.sink, "requests", "outcome")

    async def measured(self) -> None:
        """Let it measure that a prompt of 36 tokens takes a second."""
        for index in range(100):
            await self.begin(f"measure-{index}")
            await self.serve(f"measure-{index}", 1.0)

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert self.slow.open == {}, "something is still held"
        assert self.source._backlog.wait_s() == 0 == self.source._backlog.num_tokens()


async def refusal(watched: Watched, name: str, **request: float) -> NoRoom:
    await watched.begin(name, **request)  # type: ignore[arg-type]
    with pytest.raises(NoRoom) as caught:
        await watched.tasks[name]
    assert name not in watched.slow.open
    return caught.value


async def test_who_would_wait_too_long_is_reported_at_once_and_when_to_come_back(clock: Clock) -> None:
    watched = Watched(clock, max_first_token_s=2.5)
    await watched.measured()
    for name in ("a", "b"):
        await watched.begin(name)
    await watched.begin("c")  # two seconds behind the others: still within the limit
    error = await refusal(watched, "d")
    assert error.reason == "time_to_first_token"
    assert error.retry_after_s == pytest.approx(0.5, abs=0.1)
    reply = reply_for(error)
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "engine_overloaded", "1")
    assert "about 3.0 s" in reply.message and "2.5 s" in reply.message
    await watched.serve("a", 1.0)
    await watched.begin("e")
    assert "e" in watched.slow.open
    assert watched.refusals() == {"time_to_first_token": 1}
    await watched.end()


async def test_an_idle_server_takes_a_prompt_of_any_length(clock: Clock) -> None:
    watched = Watched(clock, max_first_token_s=0.5)
    await watched.measured()
    await watched.begin("long", 900)
    assert "long" in watched.slow.open, "it waits for nobody; to come back later would not help"
    await refusal(watched, "short")
    await watched.end()


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(clock: Clock) -> None:
    watched = Watched(clock)
    await watched.measured()
    for name in ("a", "b", "c"):
        await watched.begin(name)
    error = await refusal(watched, "d", timeout_s=2)
    assert error.reason == "deadline"
    assert error.retry_after_s == pytest.approx(1, abs=0.15)
    await watched.begin("e", timeout_s=4)
    assert "e" in watched.slow.open
    await watched.end()


async def test_so_many_prompt_tokens_may_wait(clock: Clock) -> None:
    watched = Watched(clock, max_queued_tokens=100)
    await watched.begin("too long for ever", 300)
    assert "too long for ever" in watched.slow.open, "nothing waits, so there is no queue to limit"
    error = await refusal(watched, "b", num_tokens=1)
    assert (error.reason, error.retry_after_s) == ("queued_tokens", 1.0)
    watched.slow.give("too long for ever")
    while watched.source._backlog.num_tokens():
        await asyncio.sleep(0)
    await watched.begin("c", 60)
    await watched.begin("d", 40)
    await refusal(watched, "e", num_tokens=1)
    await watched.end()


async def test_prompts_of_one_body_do_not_wait_behind_each_other(clock: Clock) -> None:
    watched = Watched(clock, max_first_token_s=2.5, max_queued_tokens=150, max_running=64)
    await watched.measured()
    for index in range(20):
        await watched.begin(f"cmpl-a-{index}")
        assert f"cmpl-a-{index}" in watched.slow.open, "a body is let in whole"
    assert watched.source._backlog.num_tokens() == 20 * 36
    for other in ("cmpl-b-0", "cmpl-c-0"):
        await refusal(watched, other)
    await watched.end()


async def test_choices_share_a_prompt_and_count_as_requests(clock: Clock) -> None:
    watched = Watched(clock, max_queued_tokens=100, max_running=4)
    await watched.begin("a", 50, choices=3)
    await watched.begin("b", 50)
    error = await refusal(watched, "c", num_tokens=1)
    assert error.reason == "capacity"
    await watched.begin("many", choices=5)
    with pytest.raises(InvalidRequest, match="n asks for 5 choices"):
        await watched.tasks["many"]
    assert watched.refusals() == {"capacity": 1}
    await watched.end()


async def test_newcomers_are_refused_beyond_the_load_and_a_body_is_let_in_whole(clock: Clock) -> None:
    watched = Watched(clock, max_running=20, max_others=3)
    await watched.begin("cmpl-a-0")
    await watched.begin("cmpl-b-0", choices=4)
    for index in range(1, 4):
        await watched.begin(f"cmpl-b-{index}")
        assert f"cmpl-b-{index}" in watched.slow.open, "its own prompts do not stand in its way"
    error = await refusal(watched, "cmpl-c-0")
    assert error.reason == "load" and error.retry_after_s > 0
    assert (await refusal(watched, "cmpl-a-1")).reason == "load", "those of another body do"
    assert watched.refusals() == {"load": 2}
    watched.tasks["cmpl-b-0"].cancel()  # all four of its choices
    await asyncio.gather(watched.tasks["cmpl-b-0"], return_exceptions=True)
    await watched.serve("cmpl-b-1", 1.0)
    await watched.serve("cmpl-b-2", 1.0)
    await watched.begin("cmpl-c-0")
    assert "cmpl-c-0" in watched.slow.open, "two are left"
    await watched.end()


async def test_a_request_that_runs_out_of_time_ends_and_holds_nothing(clock: Clock) -> None:
    watched = Watched(clock)
    await watched.begin("queued", timeout_s=0.05)
    with pytest.raises(RequestTimeout, match=r"0\.05 s"):
        await watched.tasks["queued"]
    await watched.begin("running", timeout_s=0.2)
    watched.slow.give("running")
    with pytest.raises(RequestTimeout) as caught:
        await watched.tasks["running"]
    assert reply_for(caught.value).status == 504
    assert watched.slow.open == {}
    await watched.end()
    assert watched.outcomes() == {"error": 2}
    limited = Watched(clock, timeout_s=0.05)  # the server's own limit holds whatever is asked
    await limited.begin("a", timeout_s=1000)
    with pytest.raises(RequestTimeout, match=r"0\.05 s"):
        await limited.tasks["a"]
    await limited.end()


class Failing(Slow):
    """A source that fails, after so many tokens of each request."""

    def __init__(self, error: Exception, num_given: int = 0) -> None:
        super().__init__()
        self._error = error
        self._num_given = num_given

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        self.started += 1
        for _ in range(self._num_given):
            for request in requests:
                yield TokenDelta(request.request_id, (5,))
        raise self._error


@pytest.mark.parametrize(
    ("error", "refusals", "at_once"),
    [
        (InvalidRequest("response_format", "The schema cannot be used."), {}, "rejected"),
        (EngineOverloaded("All replicas are busy."), {"capacity": 1}, "rejected"),
        (NoRoom("load", "Too many.", 1.0), {"load": 1}, "rejected"),
        (EngineFault("no"), {}, "error"),
    ],
)
async def test_what_the_source_refuses_is_rejected_unless_it_has_begun_and_might_be_served(
    clock: Clock, error: Exception, refusals: dict[str, float], at_once: str
) -> None:
    on_the_way = "rejected" if isinstance(error, InvalidRequest) else "error"
    for num_given, outcome in ((0, at_once), (1, on_the_way)):
        ended: list[str] = []
        watched = Watched(clock)
        watched.source.source = watched.slow = Failing(error, num_given)
        watched.source.ended = lambda record, answer, ended=ended: ended.append(record.request.request_id)
        await watched.begin("cmpl-a-0", choices=2)
        with pytest.raises(type(error)):
            await watched.tasks["cmpl-a-0"]
        await watched.end()
        assert watched.outcomes() == {outcome: 2} and watched.refusals() == refusals
        assert ended == [], "nothing of it is to be checked"


async def test_the_other_prompts_of_a_refused_body_are_rejected_too(clock: Clock) -> None:
    watched = Watched(clock, max_running=4)
    for name in ("cmpl-a-0", "cmpl-a-1", "cmpl-a-2", "cmpl-b-0"):
        await watched.begin(name)
    watched.slow.give("cmpl-a-1")
    await asyncio.sleep(0.01)
    assert (await refusal(watched, "cmpl-a-3")).reason == "capacity"
    await watched.end()  # as the front end lets go of the others
    assert watched.outcomes() == {"rejected": 3, "abort": 2}, "one has begun, and one is another body's"
    assert watched.refusals() == {"capacity": 1}


# -- when to come back ------------------------------------------------------------------------------------------------


async def test_each_choice_is_in_one_stage_until_the_last_byte_of_the_reply(tokenizer: Tokenizer) -> None:
    slow, sink, taken = Slow(), BufferSink("r1"), asyncio.Event()
    metrics = Metrics(sink, model_name="m", pool="decode")
    here = InFlight(metrics)
    source = observed(slow, metrics, in_flight=here)
    app = build_ingress(front_end(source, tokenizer), gate=Gate(Access(), in_flight=here))
    body = json.dumps({"model": "m", "prompt": "hello", "n": 2, "stream": True}).encode()
    waiting: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message: Message) -> None:  # a slow client lets the last message wait
        await asyncio.sleep(0) if message.get("more_body", True) else await taken.wait()

    async def reached(**stages: int) -> None:
        await until(lambda: in_flight(sink.drain()) == stages)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    serving = asyncio.create_task(app(scope | {"app": app}, receive, send))
    await until(lambda: slow.started == 1)
    first, second = slow.open
    await reached(prefill=2)
    slow.give(first)
    await reached(prefill=1, decode=1)
    slow.give(first, FinishReason.LENGTH)
    await reached(prefill=1, reply=1)
    slow.give(second, FinishReason.LENGTH)
    await reached(reply=2)
    taken.set()
    await serving
    await reached()


def test_who_is_turned_away_comes_back_when_room_is_expected_one_after_the_other(clock: Clock) -> None:
    returns = Returns(clock)
    for _ in range(50):
        returns.ended(40.0)
    ages = [10.0] * 8  # all of a burst
    waits = [returns.wait_s(ages, 1) for _ in range(3)]
    assert waits == pytest.approx([30.0] * 3), "room comes free when the burst ends"
    spread = Returns(clock)
    for _ in range(50):
        spread.ended(40.0)
    ages = [5.0 * place for place in range(8)]  # a steady stream: one ends every five seconds
    assert [spread.wait_s(ages, 1) for _ in range(4)] == pytest.approx([5, 10, 15, 20])
    clock.now += 30
    assert spread.wait_s(ages, 1) == pytest.approx(5), "those who were refused before have been back"


def test_a_time_to_come_back_is_one_that_clients_keep(clock: Clock) -> None:
    returns = Returns(clock)
    assert 1 <= returns.wait_s([0.0] * 4, 1) <= 60, "nothing has ended yet, and nobody knows how long it takes"
    returns.ended(600.0)
    assert returns.wait_s([0.0] * 4, 1) == 60, "openai's clients pass over what is longer"
    quick = Returns(clock)
    quick.ended(0.01)
    assert quick.wait_s([0.0] * 4, 1) == 1


def test_two_retries_reach_past_the_end_of_a_first_burst(clock: Clock) -> None:
    """A burst on a service that has answered nothing yet: clients come back twice, as openai's do."""
    returns, began = Returns(clock), clock.now
    for _ in range(2):
        clock.now += math.ceil(returns.wait_s([clock.now - began] * 32, 1))
    assert clock.now - began >= 60


async def test_the_demo_lets_a_burst_of_64_wait(clock: Clock) -> None:
    args = load_config(Path(__file__).parents[4] / "deploy" / "configs" / "demo.yaml").application.effective_args
    most = int(args.limits.max_load * args.engine.max_num_seqs)
    watched = Watched(clock, max_running=args.limits.max_ongoing_requests, max_others=most)
    for number in range(64):
        await watched.begin(f"cmpl-{number}-0")
    assert len(watched.slow.open) == 64 and watched.refusals() == {}
    await watched.end()
