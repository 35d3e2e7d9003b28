"""Answers that wait for their check, and those that do not."""

import asyncio
import dataclasses

import pytest

from serve_app.referee.answer import Answer
from serve_app.referee.replay_selection import Checks, Selection, chosen
from serve_app.referee.verdicts import Checked, Verdict
from speculative.request import Request
from tests.support.referees import recorded


class Referee:
    """Takes answers; those that are waited for end when a test says so."""

    def __init__(self) -> None:
        self.submitted: list[Answer] = []
        self.waiting: dict[str, asyncio.Future[Checked]] = {}

    async def check(self, one: Answer) -> Checked:
        self.waiting[one.request.request_id] = asyncio.get_running_loop().create_future()
        return await self.waiting[one.request.request_id]


@pytest.fixture
def referee() -> Referee:
    return Referee()


def checks_of(referee: Referee, timeout_s: float = 5.0) -> Checks:
    return Checks(
        lambda name: name.startswith("chosen"),
        lambda request: not request.adapter,
        referee.submitted.append,
        referee.check,
        timeout_s,
    )


def is_checked(checks: Checks, name: str) -> bool:
    return checks.select(Request(name, (1,))) is not Selection.NOT_CHECKED


async def test_who_does_not_ask_does_not_wait(referee: Referee) -> None:
    checks = checks_of(referee)
    assert is_checked(checks, "chosen-0") and not is_checked(checks, "other-0")
    checks.ended(recorded("chosen-0"))
    assert [one.request.request_id for one in referee.submitted] == ["chosen-0"]
    assert referee.waiting == {}


async def test_who_asks_is_chosen_and_waits(referee: Referee) -> None:
    checks = checks_of(referee)
    with checks.expecting(["a-0", "a-1"]):
        assert is_checked(checks, "a-0")
        for name in ("a-0", "a-1"):
            checks.ended(recorded(name))
        waiting = asyncio.create_task(checks.verdicts(["a-0", "a-1"]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        referee.waiting["a-1"].set_result(Checked(Verdict.SUSPECT))
        referee.waiting["a-0"].set_result(Checked(Verdict.VERIFIED))
        assert [one.verdict for one in await waiting] == [Verdict.VERIFIED, Verdict.SUSPECT]
    assert not is_checked(checks, "a-0"), "nothing is left behind"
    assert referee.submitted == []


def test_some_chosen_requests_are_computed_as_they_were_sent_if_their_replay_shows_more(referee: Referee) -> None:
    checks, requests = checks_of(referee), [Request(f"chosen-{number}-0", (1,)) for number in range(1000)]
    left = [request for request in requests if checks.select(request) is Selection.AS_SENT]
    assert 200 < len(left) < 300
    selected = {request.request_id for request in requests if chosen(request.request_id, 0.1)}
    assert 5 < len([request for request in left if request.request_id in selected]) < len(selected) - 5
    with checks.expecting([request.request_id for request in left]):
        assert {checks.select(request) for request in left} == {Selection.WITH_LOGPROBS}, "its client waits for all"
    of_adapters = [dataclasses.replace(request, adapter="sql") for request in left]
    assert {checks.select(request) for request in of_adapters} == {Selection.WITH_LOGPROBS}


async def test_what_cannot_be_checked_in_time_is_unverified(referee: Referee) -> None:
    checks = checks_of(referee, timeout_s=0.02)
    with checks.expecting(["late-0", "failed-0", "silent-0"]):
        checks.ended(recorded("late-0"))
        checks.ended(recorded("failed-0"))
        await asyncio.sleep(0)
        referee.waiting["failed-0"].set_exception(ConnectionError("no referee"))
        reported = await checks.verdicts(["late-0", "failed-0", "silent-0"])
    assert {one.verdict for one in reported} == {Verdict.UNVERIFIED}
    assert len({one.reason for one in reported}) == 3
    await asyncio.sleep(0)
    assert not referee.waiting["late-0"].done(), "its answer is evidence, whoever waits"


async def test_a_check_goes_on_when_its_client_leaves_at_any_moment(referee: Referee) -> None:
    checks = checks_of(referee)

    async def ask() -> None:
        with checks.expecting(["a-0"]):
            checks.ended(recorded("a-0"))
            await checks.verdicts(["a-0"])

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with checks.expecting(["b-0"]):  # as when the client leaves in the middle of its stream
        checks.ended(recorded("b-0"))
    await asyncio.sleep(0)
    assert {"a-0", "b-0"} <= referee.waiting.keys()
    assert not any(referee.waiting[name].done() for name in ("a-0", "b-0"))
    assert not is_checked(checks, "a-0")


async def test_a_check_that_serve_cancelled_is_no_cancellation_of_its_client(referee: Referee) -> None:
    checks = checks_of(referee)
    with checks.expecting(["a-0"]):
        checks.ended(recorded("a-0"))
        await asyncio.sleep(0)
        referee.waiting["a-0"].cancel()
        (reported,) = await checks.verdicts(["a-0"])
    assert (reported.verdict, reported.reason) == (Verdict.UNVERIFIED, "the referee did not answer")
