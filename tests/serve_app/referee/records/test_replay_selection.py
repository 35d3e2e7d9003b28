"""Replies that wait for their check, and those that do not."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence

import pytest

from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.records import Record
from serve_app.referee.records.replay_selection import Checks, Read, Selection, chosen
from serve_app.referee.wire.exchange import Exchange
from speculative.request import Request
from tests.support.referees import record_of, traces_of
from tests.support.waiting import until


class Referee:
    """Takes answers; those that are waited for end when a test says so."""

    def __init__(self) -> None:
        self.submitted: list[Answer] = []
        self.checked: list[Answer] = []
        self.counted: list[str] = []
        self.waiting: dict[str, asyncio.Future[Checked]] = {}

    @property
    def names(self) -> list[str]:
        return [one.request.request_id for one in self.submitted]

    def submit(self, one: Answer, reply_bytes: str) -> None:
        self.submitted.append(one)
        self.counted.append(reply_bytes)

    async def check(self, one: Answer) -> Checked:
        self.checked.append(one)
        self.waiting[one.request.request_id] = asyncio.get_running_loop().create_future()
        return await self.waiting[one.request.request_id]


@pytest.fixture
def referee() -> Referee:
    return Referee()


SENT = Exchange("/v1/completions", b"{}", b"{}", False, 0.0, 0.0)


def checks_of(referee: Referee, timeout_s: float = 5.0, read: Read = traces_of, longest_s: float = 60.0) -> Checks:
    return Checks(
        lambda reply_id: reply_id.startswith("chosen"),
        lambda request: not request.adapter,
        read,
        referee.submit,
        referee.check,
        timeout_s,
        longest_s,
    )


def is_checked(checks: Checks, name: str) -> bool:
    return checks.select(Request(name, (1,))) is not Selection.NOT_CHECKED


async def asking(checks: Checks, referee: Referee, *names: str) -> asyncio.Task[list[Checked]]:
    """What a client waits for: two choices of a reply have ended, and are judged."""
    checks.expect("a", awaited=True)
    for name in ("a-1", "a-0"):
        checks.ended(record_of(name))
    waiting = asyncio.create_task(checks.verdicts(names, SENT))
    await until(lambda: len(referee.waiting) == 2)
    return waiting


async def test_a_reply_waits_for_its_bytes_with_all_of_its_choices(referee: Referee) -> None:
    seen: list[tuple[Exchange, list[str]]] = []

    def read(exchange: Exchange, records: Sequence[Record]) -> list[Answer]:
        seen.append((exchange, [one.request.request_id for one in records]))
        return traces_of(exchange, records)

    checks = checks_of(referee, read=read)
    assert checks.expect("chosen", awaited=False) and not checks.expect("other", awaited=False)
    assert is_checked(checks, "chosen-1") and not is_checked(checks, "other-0")
    for number in (10, 9, 0):
        checks.ended(record_of(f"chosen-{number}"))
    checks.ended(record_of("other-0"))
    assert referee.names == ["other-0"], "it broke a limit: nobody keeps its bytes"
    await checks.sent("chosen", SENT)
    assert seen == [(SENT, ["chosen-0", "chosen-9", "chosen-10"])]
    assert referee.names == ["other-0", *seen[0][1]] and referee.counted == ["not_kept", *["unread"] * 3]
    checks.ended(record_of("chosen-11"))
    assert referee.names[-1] == "chosen-11", "it came too late"


async def test_a_reply_that_is_lost_or_cannot_be_read_is_checked_by_its_records(
    referee: Referee, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> list[Answer]:
        raise ArithmeticError("a client's own words")

    checks = checks_of(referee, read=failing)
    for number in range(3):
        checks.expect(f"chosen{number}", awaited=False)
        checks.ended(record_of(f"chosen{number}-0"))
    checks.lost("chosen0", "ended_early")
    await checks.sent("chosen1", SENT)
    await checks.sent("chosen2", SENT)
    assert referee.names == ["chosen0-0", "chosen1-0", "chosen2-0"]
    assert referee.counted == ["ended_early", "unread", "unread"]
    (logged,) = caplog.records
    assert "ArithmeticError" in logged.getMessage() and "own words" not in caplog.text


async def test_a_client_that_takes_its_reply_slowly_holds_up_no_check_of_its_tokens(referee: Referee) -> None:
    checks = checks_of(referee, longest_s=0.01)
    checks.expect("chosen", awaited=False)
    checks.ended(record_of("chosen-0"))
    await until(lambda: referee.counted == ["ended_early"])
    checks.ended(record_of("chosen-1"))  # another choice, which comes late
    await checks.sent("chosen", SENT)
    checks.lost("chosen", "ended_early")
    assert referee.names == ["chosen-0", "chosen-1"], "each is checked once"


async def test_who_asks_is_chosen_and_waits(referee: Referee) -> None:
    checks = checks_of(referee)
    waiting = await asking(checks, referee, "a-0", "a-1")
    assert is_checked(checks, "a-0")
    referee.waiting["a-1"].set_result(Checked(Verdict.SUSPECT))
    referee.waiting["a-0"].set_result(Checked(Verdict.VERIFIED))
    assert [one.verdict for one in await waiting] == [Verdict.VERIFIED, Verdict.SUSPECT]
    await checks.sent("a", SENT)
    assert not is_checked(checks, "a-0"), "nothing is left behind"
    assert referee.submitted == []


async def test_what_went_out_and_is_not_what_was_judged_is_judged_again(referee: Referee) -> None:
    def read(exchange: Exchange, records: Sequence[Record]) -> list[Answer]:
        same, other = traces_of(exchange, records)
        return [same, other if exchange is SENT else dataclasses.replace(other, token_ids=(9, 9))]

    checks = checks_of(referee, read=read)
    waiting = await asking(checks, referee, "a-0", "a-1")
    for check in referee.waiting.values():
        check.set_result(Checked(Verdict.VERIFIED))
    await waiting
    referee.waiting.clear()
    await checks.sent("a", dataclasses.replace(SENT, reply=b"{ }"))
    await until(lambda: bool(referee.waiting))
    changed = "wire: what was sent is not what was judged before"
    assert [one.broken_limit for one in referee.checked] == ["", "", changed]
    assert [*referee.waiting] == ["a-1"]


def test_some_chosen_replies_are_computed_as_they_were_sent_if_their_replay_shows_more(referee: Referee) -> None:
    checks, requests = checks_of(referee), [Request(f"chosen-{number}-0", (1,)) for number in range(1000)]
    left = [request for request in requests if checks.select(request) is Selection.AS_SENT]
    assert 200 < len(left) < 300
    others = [dataclasses.replace(request, request_id=f"{request.request_id[:-2]}-7") for request in left]
    assert {checks.select(request) for request in others} == {Selection.AS_SENT}, "all choices of a reply alike"
    selected = {request.request_id for request in requests if chosen(request.request_id[:-2], 0.1)}
    assert 5 < len([request for request in left if request.request_id in selected]) < len(selected) - 5
    for request in left:
        checks.expect(request.request_id[:-2], awaited=True)
    assert {checks.select(request) for request in left} == {Selection.WITH_LOGPROBS}, "its client waits for all"
    of_adapters = [dataclasses.replace(request, adapter="sql") for request in left]
    assert {checks.select(request) for request in of_adapters} == {Selection.WITH_LOGPROBS}


async def test_what_cannot_be_checked_in_time_is_unverified(referee: Referee) -> None:
    checks = checks_of(referee, timeout_s=0.02)
    waiting = await asking(checks, referee, "a-0", "a-1", "a-2")
    referee.waiting["a-1"].set_exception(ConnectionError("no referee"))
    reported = await waiting
    assert {one.verdict for one in reported} == {Verdict.UNVERIFIED}
    assert len({one.reason for one in reported}) == 3
    await asyncio.sleep(0)
    assert not referee.waiting["a-0"].done(), "its answer is evidence, whoever waits"


@pytest.mark.parametrize("when", ["before it is read", "while it is judged", "when Serve cancels its check"])
async def test_a_check_goes_on_when_its_client_leaves_at_any_moment(referee: Referee, when: str) -> None:
    reading, read_on = threading.Event(), threading.Event()

    def read(exchange: Exchange, records: Sequence[Record]) -> list[Answer]:
        reading.set()
        assert when != "before it is read" or read_on.wait(30)
        return traces_of(exchange, records)

    checks = checks_of(referee, read=read)
    checks.expect("a", awaited=True)
    checks.ended(record_of("a-0"))
    asking = asyncio.create_task(checks.verdicts(["a-0"], SENT))
    await until(lambda: reading.is_set() and (when == "before it is read" or bool(referee.waiting)))
    if when == "when Serve cancels its check":
        referee.waiting["a-0"].cancel()
        (reported,) = await asking
        assert (reported.verdict, reported.reason) == (Verdict.UNVERIFIED, "the referee did not answer")
        return
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    read_on.set()
    checks.lost("a", "ended_early")
    await asyncio.sleep(0.01)
    assert [*referee.names, *referee.waiting] == ["a-0"], "once"
    assert not any(check.done() for check in referee.waiting.values())
