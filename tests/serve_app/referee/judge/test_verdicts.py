"""What is remembered of answers: by choice, in bounds, and a trip outweighs a check."""

import dataclasses
import itertools

from serve_app.referee.judge.verdicts import (
    REHEARSED,
    Checked,
    CheckResult,
    Finished,
    Trip,
    Verdict,
    VerdictBook,
    folded,
)
from tests.support.referees import recorded

VERIFIED = Checked(Verdict.VERIFIED, "replayed", 2, 1.0, 0.0, "p1")


def verdicts(book: VerdictBook, reply_id: str) -> list[str]:
    reply = book.reply(reply_id)
    assert reply is not None
    return [choice["verdict"] for choice in reply["choices"]]


def test_what_checks_find_is_one_verdict_whatever_their_order() -> None:
    names = ("logprobs", "distribution", "support", "draws", "alternatives")
    for first, later in itertools.combinations(names, 2):
        findings = [CheckResult(name, 4, f"{name}: off" if name in (first, later) else "") for name in names[::-1]]
        assert folded(findings) == (Verdict.SUSPECT, f"{first}: off", names[::-1])
    for ran, verdict in (
        ({"likeliest": 4, "draws": 0}, Verdict.VERIFIED),
        ({"logprobs": 4, "draws": 4}, Verdict.LOGPROBS_ONLY),
        ({"logprobs": 0, "wire": 1}, Verdict.UNVERIFIED),  # nothing was computed again
    ):
        found = folded([CheckResult(*one) for one in ran.items()])
        assert (found[0], found[2]) == (verdict, tuple(name for name, number in ran.items() if number))
    assert folded([CheckResult("logprobs", 0, "drift")])[0] is Verdict.SUSPECT, "of a prompt alone"


def test_choices_have_verdicts_of_their_own_and_the_reply_the_worst() -> None:
    book = VerdictBook(10)
    for choice in (1, 0, 2):
        book.note("r1", Finished(f"cmpl-a-{choice}", 10, 12))
    book.record(recorded("cmpl-a-1"), VERIFIED, now=13)
    reply = book.reply("cmpl-a")
    assert reply is not None
    assert (reply["id"], reply["verdict"]) == ("cmpl-a", "unverified")
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert verdicts(book, "cmpl-a") == ["unverified", "verified", "unverified"]
    assert reply["choices"][1]["tme"] == 1.0
    assert book.reply("cmpl-b") is None


def test_a_trip_makes_suspect_what_ended_about_then_whenever_it_is_reported() -> None:
    book = VerdictBook(10)
    times = {"before": (1, 4.9), "within": (1, 6), "running": (9, 14), "after": (11, 12)}
    book.note("r1", Finished("before-0", *times["before"]))
    book.note("r1", Finished("within-0", *times["within"]))
    book.note("r2", Finished("elsewhere-0", 6, 9))
    assert book.trip("r1", Trip("drift", at=10, suspect_since=5)) == 1
    book.note("r1", Finished("running-0", *times["running"]))
    book.note("r1", Finished("after-0", *times["after"]))
    found = [name for name in (*times, "elsewhere") if verdicts(book, name) == ["suspect"]]
    assert found == ["within", "running"]
    book.record(recorded("rehearsal-x-0"), dataclasses.replace(VERIFIED, reason=f"{REHEARSED}draws"), now=13)
    listed = {one["id"]: (one["verdict"], one["ended_at"]) for one in book.of_replica("r1", since=5.5)}
    assert listed == {"within": ("suspect", 6), "running": ("suspect", 14), "after": ("unverified", 12)}
    assert "drift" in (book.reply("within") or {})["choices"][0]["reason"]


def test_a_trip_of_the_prefill_replica_makes_suspect_what_was_decoded_from_its_handoffs() -> None:
    book = VerdictBook(10)
    book.note("r1", Finished("unchecked-0", 6, 7, prefilled_by="p1"))
    book.record(recorded("checked-0", began_at=6, prefilled_by="p1"), VERIFIED, now=7)
    book.note("r1", Finished("checked-0", 6, 7, prefilled_by="p1"))
    book.note("r1", Finished("other-0", 6, 7, prefilled_by="p2"))
    assert book.trip("p1", Trip("drift", at=10, suspect_since=5)) == 2
    reported = {name: verdicts(book, name)[0] for name in ("unchecked", "checked", "other")}
    assert reported == {"unchecked": "suspect", "checked": "suspect", "other": "unverified"}


def test_a_check_cannot_clear_what_a_trip_made_suspect() -> None:
    book = VerdictBook(10)
    book.note("r1", Finished("a-0", 6, 7))
    book.trip("r1", Trip("selfcheck", at=10, suspect_since=5))
    assert book.record(recorded("a-0", began_at=6), VERIFIED, now=11).verdict is Verdict.SUSPECT
    assert verdicts(book, "a") == ["suspect"]


def test_the_oldest_replies_are_forgotten() -> None:
    book = VerdictBook(3)
    for number in range(100):
        book.note("r1", Finished(f"cmpl-{number}-0", number, number))
        book.note("r1", Finished(f"cmpl-{number}-1", number, number))
    assert [number for number in range(100) if book.reply(f"cmpl-{number}") is not None] == [97, 98, 99]


def test_a_reply_was_checked_for_what_all_of_its_choices_were() -> None:
    book = VerdictBook(10)
    for choice, checks in enumerate((("logprobs", "support", "distribution"), ("logprobs", "support"))):
        book.record(recorded(f"cmpl-a-{choice}"), dataclasses.replace(VERIFIED, checks=checks), now=13)
    reply = book.reply("cmpl-a")
    assert reply is not None
    assert reply["checked"] == ["logprobs", "support"]
    book.trip("r1", Trip("drift", at=20.0, suspect_since=0.0))
    suspect = book.reply("cmpl-a")
    assert suspect is not None
    assert (suspect["verdict"], suspect["checked"]) == ("suspect", ["logprobs", "support"])
