"""What replicas do of their own accord, with a fake engine and a fake referee, and without Ray around them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serve_app.config.files import parse_args
from serve_app.deployments import stream_router
from serve_app.deployments.http_front import HttpFront
from serve_app.deployments.remote_errors import answered
from serve_app.guard.breaker import BreakerState, Mode
from serve_app.referee.judge.verdicts import Finished
from serve_app.referee.records.replay_selection import Checks
from serve_app.referee.wire.exchange import Exchange
from serve_app.telemetry.tracing import Tracing
from speculative.errors import EngineFault, InvalidRequest
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta
from speculative.stats import StepStats
from tests.support.front_ends import in_flight
from tests.support.referees import CLIENT, RefereeHandle, Worker, record_of, recorded, traces_of


@pytest.fixture
async def worker(referee: RefereeHandle) -> AsyncIterator[Worker]:
    made = object.__new__(Worker)
    await made.__init__(parse_args({"model": {"source": "fake"}}), "decode", referee)  # type: ignore[misc]
    referee.reports.clear()  # of its start
    referee.callers.clear()
    yield made
    tasks = list(made.host.runtime.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("way", [0, 1], ids=["before_it_is_heard", "before_it_is_answered"])
async def test_a_report_whose_caller_leaves_is_sent_and_its_answer_obeyed(
    worker: Worker, referee: RefereeHandle, way: int
) -> None:
    await worker.host.reporter.report()
    referee.registry.order(Mode.OFF, None)
    worker.host.breaker_controller.inspect(StepStats(alarms={"f": 1}))
    worker.host.finished.append(Finished("cmpl-1-0", 1.0, 2.0))
    worker.host.runtime.metrics.count("truespec_requests_total", 7, outcome="stop")
    referee.far[way].clear()
    caller = asyncio.create_task(worker.host.reporter.report())
    await _settle()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    referee.far[way].set()
    await worker.host.reporter.report()
    assert [trip.reason for report in referee.reports for trip in report.trips] == ["selfcheck"]
    assert [one.request_id for report in referee.reports for one in report.finished] == ["cmpl-1-0"]
    assert referee.counted("requests_total") == 7
    assert worker.host.breaker_controller.status.mode is Mode.OFF


async def test_reports_go_one_at_a_time_and_take_along_what_their_callers_counted(
    worker: Worker, referee: RefereeHandle
) -> None:
    referee.far[0].clear()
    callers = []
    for _ in range(5):
        worker.host.runtime.metrics.count("truespec_requests_total", outcome="stop")
        callers.append(asyncio.create_task(worker.host.reporter.report()))
        await _settle()
    assert len(referee.callers) == 1, "the others wait"
    referee.far[0].set()
    await asyncio.gather(*callers)
    assert len(referee.reports) == 2, "those that waited share one"
    assert referee.counted("requests_total") == 5
    await worker.host.reporter.report()
    assert len(referee.reports) == 3


async def test_an_answer_is_replayed_whatever_becomes_of_its_client(worker: Worker, referee: RefereeHandle) -> None:
    """Serve would cancel its calls, and a report made meanwhile, when the client leaves, which may be at once."""
    runtime = worker.host.runtime
    CLIENT.set("a client")
    await worker.host.reporter.report()
    assert referee.callers.pop() == "nobody"
    referee.far[0].clear()
    with Tracing().request("POST", "req-7", [], {}):
        front = HttpFront(runtime, worker.host.reporter)
        front._submit(recorded("cmpl-1-0"), "agrees")
        checks = Checks(lambda _: True, lambda _: True, traces_of, front._submit, runtime.check, timeout_s=60.0)
        for reply_id, awaited in (("cmpl-2", True), ("cmpl-3", False)):
            checks.expect(reply_id, awaited=awaited)
            checks.ended(record_of(f"{reply_id}-0"))
        waiting = asyncio.create_task(checks.verdicts(["cmpl-2-0"], None))
        await _settle()
        waiting.cancel()
    checks.lost("cmpl-2", "ended_early")
    await checks.sent("cmpl-3", Exchange("", b"", b"", False, 0.0, 0.0))
    referee.far[0].set()
    await _settle()
    assert [one.request.request_id for one in referee.answers] == ["cmpl-1-0", "cmpl-2-0", "cmpl-3-0"]
    assert (referee.callers, referee.request_ids) == (["nobody"] * 3, ["req-7"] * 3)


async def test_a_call_that_serve_cancels_is_one_that_failed_and_not_the_end_of_its_caller() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RayServeException, match="cancelled"):
        await answered(cancelled())
    caller = asyncio.create_task(answered(asyncio.sleep(60)))
    await _settle()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_report_that_fails_is_reported_to_its_caller_and_the_next_one_goes(
    worker: Worker, referee: RefereeHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(worker.host.backend, "take_stats", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await worker.host.reporter.report()
    await worker.host.reporter.report()
    assert len(referee.reports) == 1


async def test_what_training_measured_of_a_head_is_reported(worker: Worker, referee: RefereeHandle) -> None:
    await worker.host.reporter.report()
    gauges = referee.reports[-1].batch.gauges
    rates = {
        labels[2:]: value for (name, labels), value in gauges.items() if name.endswith("held_out_acceptance_ratio")
    }
    assert rates == {("0", "sampled"): 0.5, ("1", "sampled"): 0.5 * 0.4, ("0", "greedy"): 0.75}


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_handoffs_of_canaries_are_known_to_the_records_and_leave_nothing_behind(
    worker: Worker, referee: RefereeHandle
) -> None:
    assert await worker.host.canary.try_out() is True
    assert {answer.prefilled_by for answer in referee.answers} == {"prefill-1"}
    assert worker._prefilled_by == {}
    streamed = await worker.ask(Request("cmpl-1-0", (5, 6), SamplingParams(max_tokens=8, ignore_eos=True)))
    assert [one.prefilled_by for one in streamed if one.prefilled_by] == ["prefill-1"], "the router is reported once"
    assert worker._prefilled_by == {} == in_flight(worker.host.runtime.buffer.drain())


def _gives_up(request: Request) -> TokenDelta:
    return TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, error="its own rules left no token")


def _refuses(request: Request) -> TokenDelta:
    raise InvalidRequest("bad_words", "it cannot be served")


@pytest.mark.parametrize("answer", [_gives_up, _refuses])
async def test_a_request_that_fails_by_itself_is_not_tried_again_as_a_canary(
    worker: Worker, referee: RefereeHandle, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Request], TokenDelta]
) -> None:
    """As when a client forbids every token that it allows."""
    generate = worker.host.backend.resume

    async def resume(request: Request, handoff: Any) -> AsyncGenerator[TokenDelta, None]:
        if request.params.bad_words:
            yield answer(request)
            return
        async with contextlib.aclosing(generate(request, handoff)) as deltas:
            async for delta in deltas:
                yield delta

    monkeypatch.setattr(worker.host.backend, "resume", resume)
    plain = SamplingParams(max_tokens=8, ignore_eos=True)
    impossible = SamplingParams(allowed_token_ids=(5,), bad_words=((5,),), ignore_eos=True)
    for number, params in enumerate((plain, impossible)):
        with contextlib.suppress(InvalidRequest):
            await worker.ask(Request(f"cmpl-{number}-0", (number + 5, 6), params))
    assert await worker.host.canary.try_out() is True
    assert {answer.request.prompt_token_ids[0] for answer in referee.answers} >= {5}
    ended = [(one.request_id, one.num_tokens) for one in worker.host.finished]
    assert ended == [("cmpl-0-0", 8), ("cmpl-1-0", 0)], "what it said may be suspect"
    assert worker.host.breaker_controller.status.breaker is BreakerState.CLOSED


async def test_a_worker_without_news_gives_signs_of_life_until_its_engine_is_broken(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def resume(request: Request, handoff: Any) -> AsyncGenerator[TokenDelta, None]:
        try:
            await asyncio.Event().wait()
            yield TokenDelta(request.request_id)
        finally:
            closed.append(request.request_id)

    def broken() -> None:
        raise EngineFault("it stands still")

    monkeypatch.setattr(stream_router, "_SIGNS_OF_LIFE", 10_000)
    monkeypatch.setattr(worker.host.backend, "resume", resume)
    request = Request("cmpl-1-0", (5, 6), SamplingParams(max_tokens=8, ignore_eos=True))
    stream = worker.stream([request], {}, None)  # type: ignore[arg-type]
    arrived = [(await anext(stream), in_flight(worker.host.runtime.buffer.drain())) for _ in range(4)]
    assert [one.delta is None for one, _ in arrived] == [False, False, True, True], "the prefill's token, then no more"
    assert [stages for _, stages in arrived] == [{"prefill": 1}, *[{"decode": 1}] * 3], "it is here all the time"
    monkeypatch.setattr(worker.host.backend, "check_health", broken)
    with pytest.raises(EngineFault, match="stands still"):
        await anext(stream)
    assert closed == ["cmpl-1-0"] and in_flight(worker.host.runtime.buffer.drain()) == {}
    assert worker.host.finished[-1].num_tokens == 0, "the router has the rest from another"
