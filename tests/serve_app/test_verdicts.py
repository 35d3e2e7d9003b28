"""What is remembered of answers: by choice, in bounds, and a trip outweighs a check."""

from typing import Any

from serve_app.breaker import Trip
from serve_app.replays import ReplayJob, Verdict
from serve_app.reports import Finished
from serve_app.verdicts import Checked, VerdictBook
from speculative.request import Request, TokenKind


def job(request_id: str, began_at: float = 10.0, replica: str = "r1", **changes: Any) -> ReplayJob:
    fields: dict[str, Any] = {
        "request": Request(request_id, (1, 2, 3)),
        "replica": replica,
        "prefilled_by": "",
        "began_at": began_at,
        "max_model_len": 64,
        "token_ids": (4, 5),
        "logprobs": (-1.0, -2.0),
        "kinds": (TokenKind.FIRST, TokenKind.BONUS),
        "rounds_since_handoff": (None, None),
        "preempted": (False, False),
    }
    fields |= changes
    first = fields["prefilled_by"] or fields["replica"]  # the first token is what a prefill emits
    fields.setdefault("made_by", (first, *[fields["replica"]] * (len(fields["token_ids"]) - 1)))
    return ReplayJob(**fields)


VERIFIED = Checked(Verdict.VERIFIED, "replayed", 2, 1.0, 0.0, "p1")


def verdicts(book: VerdictBook, reply_id: str) -> list[str]:
    reply = book.reply(reply_id)
    assert reply is not None
    return [choice["verdict"] for choice in reply["choices"]]


def test_choices_have_verdicts_of_their_own_and_the_reply_the_worst() -> None:
    book = VerdictBook(10)
    for choice in (1, 0, 2):
        book.note("r1", Finished(f"cmpl-a-{choice}", 10, 12))
    book.settle(job("cmpl-a-1"), VERIFIED, now=13)
    reply = book.reply("cmpl-a")
    assert reply is not None
    assert (reply["id"], reply["verdict"]) == ("cmpl-a", "unverified")
    assert [(choice["index"], choice["verdict"]) for choice in reply["choices"]] == [
        (0, "unverified"),
        (1, "verified"),
        (2, "unverified"),
    ]
    assert reply["choices"][1]["tme"] == 1.0
    assert book.reply("cmpl-b") is None


def test_a_check_may_be_quicker_than_the_news_that_the_request_has_ended() -> None:
    book = VerdictBook(10)
    book.settle(job("cmpl-a-0"), VERIFIED, now=11)
    book.note("r1", Finished("cmpl-a-0", 10, 10.5))
    assert verdicts(book, "cmpl-a") == ["verified"]


def test_a_trip_makes_suspect_what_ended_about_then_whenever_it_is_told() -> None:
    book = VerdictBook(10)
    times = {"before": (1, 4.9), "within": (1, 6), "running": (9, 14), "after": (11, 12)}
    book.note("r1", Finished("before-0", *times["before"]))
    book.note("r1", Finished("within-0", *times["within"]))
    book.note("r2", Finished("elsewhere-0", 6, 9))
    assert book.trip("r1", Trip("drift", at=10, suspect_since=5)) == 1
    book.note("r1", Finished("running-0", *times["running"]))
    book.note("r1", Finished("after-0", *times["after"]))
    told = {name: verdicts(book, name)[0] for name in (*times, "elsewhere")}
    assert told == {
        "before": "unverified",
        "within": "suspect",
        "running": "suspect",
        "after": "unverified",
        "elsewhere": "unverified",
    }
    assert "drift" in (book.reply("within") or {})["choices"][0]["reason"]


def test_a_trip_of_the_prefill_replica_makes_suspect_what_was_decoded_from_its_handoffs() -> None:
    book = VerdictBook(10)
    book.note("r1", Finished("unchecked-0", 6, 7, prefilled_by="p1"))
    book.settle(job("checked-0", began_at=6, prefilled_by="p1"), VERIFIED, now=7)
    book.note("r1", Finished("checked-0", 6, 7, prefilled_by="p1"))
    book.note("r1", Finished("other-0", 6, 7, prefilled_by="p2"))
    assert book.trip("p1", Trip("drift", at=10, suspect_since=5)) == 2
    told = {name: verdicts(book, name)[0] for name in ("unchecked", "checked", "other")}
    assert told == {"unchecked": "suspect", "checked": "suspect", "other": "unverified"}


def test_a_check_cannot_clear_what_a_trip_made_suspect() -> None:
    book = VerdictBook(10)
    book.note("r1", Finished("a-0", 6, 7))
    book.trip("r1", Trip("selfcheck", at=10, suspect_since=5))
    assert book.settle(job("a-0", began_at=6), VERIFIED, now=11).verdict is Verdict.SUSPECT
    assert verdicts(book, "a") == ["suspect"]


def test_the_oldest_replies_are_forgotten() -> None:
    book = VerdictBook(3)
    for number in range(100):
        book.note("r1", Finished(f"cmpl-{number}-0", number, number))
        book.note("r1", Finished(f"cmpl-{number}-1", number, number))
    assert [number for number in range(100) if book.reply(f"cmpl-{number}") is not None] == [97, 98, 99]
