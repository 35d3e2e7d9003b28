"""Verdicts on recent answers, bounded in memory."""

import dataclasses
import enum
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.referee.judge.alternatives import NOTHING_COMPARED, AlternativesFound
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.draws import NOT_REPLAYED, DrawsChecked
from speculative.stats import Evidence

REHEARSED = "rehearsed: "
"""Begins the reason of a verdict on an answer that was made with a known fault, and went to no client."""

_TRIPS_KEPT = 16  # of each replica, for answers that end after the trip that makes them suspect


class Verdict(enum.StrEnum):
    """The verdict on one answer; later members outweigh earlier ones."""

    VERIFIED = "verified"  # recomputed, and found correct: its tokens as well as the logprobs that it came with
    LOGPROBS_ONLY = "logprobs_only"  # its logprobs are correct; the replay could not compare its tokens
    UNVERIFIED = "unverified"  # not checked, or the check did not complete
    SUSPECT = "suspect"  # found wrong, or made where a fault was found

    @property
    def agrees(self) -> bool:
        """True where a replay was compared with the answer and nothing was wrong."""
        return self in (Verdict.VERIFIED, Verdict.LOGPROBS_ONLY)


class Distribution(enum.StrEnum):
    """The evidence that the replay of one answer gives about the distribution of its tokens."""

    TESTED = "tested"  # sampled with new random numbers: its tokens are evidence
    GREEDY = "greedy"  # nothing was sampled; each token was compared with the likeliest
    CHOSEN_SEED = "chosen_seed"  # its client chose its random numbers, or they were seen before: it is no evidence
    UNTESTED = "untested"  # no replay, or one that gives logprobs only


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of a reply with several choices."""
    order = tuple(Verdict)
    return max(verdicts, key=order.index)


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdict on one choice of an answer, and its grounds.

    Checks that may be run:
    - `logprobs`: each is compared with the replay's.
    - `support`: each token is one that the request's rules and filters allow.
    - `likeliest`: each token of a greedy answer is the likeliest.
    - `distribution`: the tokens count as evidence on whether tokens follow the model's distribution.
    - `draws`: tokens are those that the request's seed demands.
    - `wire`: its request and its reply, as they went over the wire, are compared with what the engine emitted.
    - `alternatives`: the logprobs reported of the likeliest tokens, and of those that the request names.
    """

    verdict: Verdict = Verdict.UNVERIFIED
    reason: str = "not replayed"
    num_tokens: int = 0  # compared
    tme: float | None = None  # mean of exp|g - t| over the logprobs
    max_drift_nats: float | None = None
    replayed_by: str = ""  # the replica
    checks: tuple[str, ...] = ()  # those that were run, whatever they found
    distribution: Distribution = Distribution.UNTESTED
    draws: DrawsChecked = NOT_REPLAYED
    alternatives: AlternativesFound = NOTHING_COMPARED

    def to_wire(self) -> dict[str, Any]:
        """Return the form that the API returns."""
        return {
            "verdict": self.verdict.value,
            "reason": self.reason,
            "checked": list(self.checks),
            "distribution": self.distribution.value,
            "num_tokens": self.num_tokens,
            "tme": self.tme,
            "max_drift_nats": self.max_drift_nats,
            "replayed_by": self.replayed_by,
            "draws": self.draws.to_wire(),
            "alternatives": dataclasses.asdict(self.alternatives),
        }


class CheckResult(NamedTuple):
    """The result of one of these checks."""

    check: str
    num_compared: int  # tokens, or numbers; 0 = it was not run
    wrong: str = ""  # in words; "" = nothing


_PRECEDENCE = ("logprobs", "distribution", "likeliest", "support", "draws", "alternatives", "wire")
"""Whose words are the reason of a verdict where several checks find something wrong, the first before all others."""
_OF_TOKENS = {"likeliest", "support"}
"""Without these, only logprobs were compared."""


def folded(findings: Sequence[CheckResult]) -> tuple[Verdict, str, tuple[str, ...]]:
    """The verdict on what all checks found, its reason, and the checks that were run."""
    checks = tuple(one.check for one in findings if one.num_compared)
    wrong = {one.check: one.wrong for one in findings if one.wrong}
    if wrong:
        return Verdict.SUSPECT, wrong[min(wrong, key=_PRECEDENCE.index)], checks
    if not set(checks) - {"wire"}:
        return Verdict.UNVERIFIED, "its replay reports nothing to compare with", checks
    return Verdict.LOGPROBS_ONLY if _OF_TOKENS.isdisjoint(checks) else Verdict.VERIFIED, "replayed", checks


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that came to its end."""

    request_id: str
    began_at: float  # unix seconds, by the replica's clock, as all its times
    ended_at: float
    prefilled_by: str = ""  # the prefill replica that had a part in it
    num_tokens: int = 0  # of its answer; 0 = it has none, or not all of them were made here


@dataclass(frozen=True, slots=True)
class Trip:
    """Something was found wrong."""

    reason: str
    at: float
    suspect_since: float  # answers that ended after this, and began before `at`, are suspect
    evidence: tuple[Evidence, ...] = ()  # requests in which the engine found it


@dataclass(frozen=True, slots=True)
class _Entry:
    replicas: frozenset[str]  # that took part in it
    began_at: float
    ended_at: float
    checked: Checked


@dataclass(slots=True)
class VerdictBook:
    """Verdicts by reply and choice; the oldest replies are forgotten."""

    max_replies: int = 10_000  # how many replies are remembered
    _replies: OrderedDict[str, dict[int, _Entry]] = field(default_factory=OrderedDict)
    _trips: dict[str, deque[Trip]] = field(default_factory=dict)

    def note(self, replica: str, finished: Finished) -> None:
        """A request has ended; nothing is known of it yet, unless its check was faster."""
        known = self._entry(finished.request_id)
        checked = Checked() if known is None else known.checked
        replicas = frozenset({replica, finished.prefilled_by} - {""}) | (known.replicas if known else frozenset())
        self._put(finished.request_id, _Entry(replicas, finished.began_at, finished.ended_at, checked))

    def record(self, answer: Answer, checked: Checked, now: float) -> Checked:
        """A request was checked. Returns what to report: the check cannot clear what a trip made suspect."""
        known = self._entry(answer.request.request_id)
        ended_at = now if known is None else known.ended_at  # the check may be faster than its replica's report
        return self._put(answer.request.request_id, _Entry(answer.replicas, answer.began_at, ended_at, checked)).checked

    def trip(self, replica: str, trip: Trip) -> int:
        """A replica was found faulty: what it took part in then is suspect. Returns how many answers became so."""
        self._trips.setdefault(replica, deque(maxlen=_TRIPS_KEPT)).append(trip)
        num_suspect = 0
        for choices in self._replies.values():
            for index, entry in choices.items():
                if replica in entry.replicas:
                    choices[index] = self._judged(entry)
                    num_suspect += choices[index].checked.verdict is not entry.checked.verdict
        return num_suspect

    def reply(self, reply_id: str) -> dict[str, Any] | None:
        """Return the body of GET /v1/verdicts/ID; None if nothing is known of the reply."""
        choices = self._replies.get(reply_id)
        return None if choices is None else render(reply_id, {index: choices[index].checked for index in choices})

    def of_replica(self, replica: str, since: float) -> list[dict[str, Any]]:
        """The replies to clients that a replica had a part in and that ended after a time (unix seconds), with their
        verdicts."""
        found = []
        for reply_id, choices in self._replies.items():
            own = [one for one in choices.values() if replica in one.replicas and one.ended_at > since]
            if own and not own[0].checked.reason.startswith(REHEARSED):
                verdict = worst([one.checked.verdict for one in own]).value
                found.append({"id": reply_id, "ended_at": max(one.ended_at for one in own), "verdict": verdict})
        return found

    def _entry(self, request_id: str) -> _Entry | None:
        reply_id, index = split_id(request_id)
        return self._replies.get(reply_id, {}).get(index)

    def _put(self, request_id: str, entry: _Entry) -> _Entry:
        reply_id, index = split_id(request_id)
        judged = self._judged(entry)
        self._replies.setdefault(reply_id, {})[index] = judged
        while len(self._replies) > self.max_replies:
            self._replies.popitem(last=False)
        return judged

    def _judged(self, entry: _Entry) -> _Entry:
        for trip in (trip for replica in sorted(entry.replicas) for trip in self._trips.get(replica, ())):
            if entry.checked.verdict is not Verdict.SUSPECT and (
                entry.began_at < trip.at and entry.ended_at >= trip.suspect_since
            ):
                reason = f"the replica tripped: {trip.reason}"
                checked = dataclasses.replace(entry.checked, verdict=Verdict.SUSPECT, reason=reason)
                return dataclasses.replace(entry, checked=checked)
        return entry


def checks_of_all(choices: Sequence[Checked]) -> list[str]:
    """The checks that every choice of a reply went through."""
    return [check for check in choices[0].checks if all(check in choice.checks for choice in choices)]


def render(reply_id: str, choices: dict[int, Checked]) -> dict[str, Any]:
    """A reply's verdicts on the wire."""
    reported = [choices[index] for index in sorted(choices)]
    return {
        "id": reply_id,
        "object": "verdict",
        "verdict": worst([checked.verdict for checked in reported]).value,
        "checked": checks_of_all(reported),
        "choices": [
            {"index": index, **checked.to_wire()} for index, checked in zip(sorted(choices), reported, strict=True)
        ],
    }


def split_id(request_id: str) -> tuple[str, int]:
    """A request's reply, and its choice index there."""
    reply_id, _, index = request_id.rpartition("-")
    return reply_id, int(index)
