"""Findings of replays about each replica, and the verdicts on its answers.

Each replica has its own detectors, one per stratum. What they find waits until it is taken by whoever speaks with the
replica.
"""

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from serve_app.backends.base import UNKNOWN_NUMERICS, Replayed
from serve_app.referee.book.dumps import DumpFolder
from serve_app.referee.book.incidents import IncidentKind, IncidentLog
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import Alarm, ReplicaWatch, SeenToken
from serve_app.referee.judge.tolerance import Tolerance, Tolerances
from serve_app.referee.judge.verdicts import Checked, Trip, Verdict, VerdictBook

_logger = logging.getLogger("truespec.referee")

_KEPT_CASES = 8  # of each replica, for a dump
_KEPT_LATEST = 12
_SOUND = 8  # verified answers after which a replica is taken for one that was sound when they began
_KEPT_FINDINGS = 16  # of each replica


@dataclass(frozen=True, slots=True)
class Case:
    """One complete replay; `replayed` is None if the answer was refused."""

    answer: Answer
    replayed: Replayed | None
    checked: Checked

    def to_dump(self) -> dict[str, Any]:
        """Everything about it."""
        return {
            "served": dataclasses.asdict(dataclasses.replace(self.answer, strata=())),  # they follow from the others
            "replayed": None if self.replayed is None else dataclasses.asdict(self.replayed),
            "checked": dataclasses.asdict(self.checked),
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """Replays show that a replica is wrong."""

    replica: str
    alarm: str  # drift, or what the calibration test names
    stratum: str
    began_at: float  # of the request that raised it
    evidence_since: float  # when the evidence began, at or before that


@dataclass(slots=True)
class _Replica:
    """The facts about a replica.

    Attributes:
        watches: its detectors, by the tolerance that its answers were judged with.
        findings: those that `take_findings` has not yet returned.
        cases: its latest judged answers, for dumps.
        sound: when its latest verified answers with drafts began; none is added once one was suspect.
    """

    reported_at: float  # when it reported last, or was first named by an answer
    since: float | None = None  # it is as it is now since then, unix seconds; None = not known
    plain: bool = False  # whether it drafts nothing at all
    watches: dict[Tolerance, ReplicaWatch] = field(default_factory=dict)
    findings: deque[Finding] = field(default_factory=lambda: deque(maxlen=_KEPT_FINDINGS))
    cases: deque[Case] = field(default_factory=lambda: deque(maxlen=_KEPT_CASES))
    sound: deque[float] = field(default_factory=lambda: deque(maxlen=_SOUND))
    suspected: bool = False  # as it is now

    def trusts(self, began_at: float) -> bool:
        """Return whether a request of that time is evidence about the replica as it is now."""
        return self.since is None or began_at >= self.since

    def watch(self, tolerance: Tolerance) -> ReplicaWatch:
        """Its detectors with this tolerance."""
        if tolerance not in self.watches:
            self.watches[tolerance] = ReplicaWatch(tolerance)
        return self.watches[tolerance]


@dataclass(slots=True)
class ReplicaBook:
    """The detectors of every replica; `verdicts` on what they answered, and `incidents`."""

    tolerances: Tolerances  # between the engines that answer and those that replay
    dumps: DumpFolder = field(default_factory=lambda: DumpFolder(None, 0, 0))  # where a post-mortem is written
    verdicts: VerdictBook = field(default_factory=VerdictBook)
    _: KW_ONLY
    # of each alarm, with the replica that raised it and the answer that completed its evidence
    alarmed: Callable[[Alarm, str, Case], None] = lambda alarm, replica, case: None
    clock: Callable[[], float] = time.time  # unix seconds
    incidents: IncidentLog = field(init=False)
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    # results of the latest replays
    _latest: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_LATEST))

    def __post_init__(self) -> None:
        self.incidents = IncidentLog(self.clock, self.doubtful_since)

    def add(self, case: Case, tokens: Sequence[SeenToken], drift_tolerance: float) -> Checked:
        """Show an answer's tokens to the detectors of the replicas that made them. Returns what to report of it.

        What a prefill replica made is its own. What a decode replica makes from a handoff may be wrong because of
        either, if speculation cannot be the cause: nothing at all was drafted there.
        """
        answer, replayed = case.answer, case.replayed
        by = UNKNOWN_NUMERICS if replayed is None else replayed.numerics
        tolerance = self.tolerances.between(answer.numerics, by)
        makers: dict[str, list[SeenToken]] = {}
        rounds = [*[None] * len(answer.prompt_logprobs), *answer.rounds_since_handoff]
        for token, since in zip(tokens, rounds, strict=True):
            makers.setdefault(token.made_by, []).append(token)
            maker = self._known(token.made_by)
            plainly = maker.plain and maker.since is not None and answer.began_at > maker.since
            if since is not None and plainly:
                makers.setdefault(answer.prefilled_by, []).append(token)
        greedy, raised = answer.request.params.greedy, list[str]()
        for name, own in makers.items():
            replica = self._known(name)
            replica.cases.append(case)  # for dumps, whether it is evidence or not
            if replica.trusts(answer.began_at):
                replica.suspected |= case.checked.verdict is Verdict.SUSPECT
                if case.checked.verdict is Verdict.VERIFIED and answer.num_drafted and not replica.suspected:
                    replica.sound.append(answer.began_at)
                watch = replica.watch(tolerance)
                seen = watch.see(own, greedy=greedy, drift_tolerance=drift_tolerance, at=answer.began_at)
                for found in seen:
                    self._alarm(name, replica, found, case, trips=not tolerance.assumed)
                    raised.append(found.name)
        if raised and case.checked.verdict is not Verdict.SUSPECT:  # else its verdict has it dumped
            self.dump(f"alarm {raised[0]}", case.to_dump)
        return self.report(case)

    def add_impossible(self, case: Case) -> Checked:
        """An answer that no engine takes is an alarm for each replica that made it. Returns what to report of it."""
        if case.answer.request.canary:  # its own replica judges by it; clients never saw it
            self.dump_suspect(case)
            return case.checked
        for name in sorted(set(case.answer.made_by)):
            replica = self._known(name)
            replica.cases.append(case)
            if replica.trusts(case.answer.began_at):
                found = "wire" if case.answer.wire == "differs" else "impossible"
                self._alarm(name, replica, Alarm(found, "all", case.answer.began_at), case)
        return self.report(case)

    def report(self, case: Case) -> Checked:
        """Record a verdict, in the place of an earlier one on the same answer. Returns what to report of the answer."""
        answer, checked = case.answer, case.checked
        reported = self.verdicts.record(answer, checked, self.clock())
        self._latest.appendleft({"at": self.clock(), "replica": answer.replica, **reported.to_wire()})
        if checked.verdict is Verdict.SUSPECT:
            _logger.warning("%s of %s is suspect: %s", answer.request.request_id, answer.replica, checked.reason)
        self.dump_suspect(case)
        return reported

    def dump_suspect(self, case: Case) -> None:
        """Dump an answer if it was found wrong, whoever it was for."""
        if case.checked.verdict is Verdict.SUSPECT:
            self.dump(case.checked.reason, case.to_dump)

    def _alarm(self, name: str, replica: _Replica, found: Alarm, case: Case, *, trips: bool = True) -> None:
        self.incidents.note("replay", found.name, name, alarm=found)
        _logger.warning("replays show that %s is wrong: %s in stratum %s", name, found.name, found.stratum)
        if trips:
            own = Finding(name, found.name, found.stratum, case.answer.began_at, found.evidence_since)
            replica.findings.append(own)
        self.alarmed(found, name, case)

    def _known(self, name: str) -> _Replica:
        if name not in self._replicas:
            self._replicas[name] = _Replica(reported_at=self.clock())
        return self._replicas[name]

    def observe(self, name: str, *, since: float, plain: bool) -> None:
        """A replica has reported. What began before it changed says nothing about it any more.

        Args:
            since: when it last changed, unix seconds.
            plain: whether it drafts nothing at all, for clients or otherwise.
        """
        replica = self._known(name)
        if replica.since is not None and replica.since != since:
            replica.watches.clear()
            replica.findings.clear()
            replica.sound.clear()
            replica.suspected = False
        replica.since, replica.plain, replica.reported_at = since, plain, self.clock()

    def doubtful_since(self, name: str) -> float | None:
        """Since when answers of a replica may be wrong if it is at fault now: the first of its last verified ones, or
        its last change. None = not known."""
        replica = self._known(name)
        return replica.sound[0] if len(replica.sound) == _SOUND else replica.since

    def take_findings(self, name: str) -> tuple[Finding, ...]:
        """The findings about a replica since the last call."""
        replica = self._known(name)
        taken = tuple(replica.findings)
        replica.findings.clear()
        return taken

    def forget(self, before: float) -> None:
        """Forget replicas that were last heard of before that time, unix seconds."""
        self._replicas = {name: one for name, one in self._replicas.items() if one.reported_at > before}

    def trip(self, name: str, trip: Trip, status: dict[str, object]) -> int:
        """A replica was found faulty: what it took part in then is suspect. Returns how many answers became so. status:
        of the replica, for the dump."""
        kind: IncidentKind = "canary" if trip.reason == "canary" else "trip"
        self.incidents.note(kind, trip.reason, name, at=trip.at, suspect_since=trip.suspect_since)
        num_suspect = self.verdicts.trip(name, dataclasses.replace(trip, evidence=()))
        _logger.error("%s tripped (%s); %d of its answers are suspect", name, trip.reason, num_suspect)
        cases = tuple(self._known(name).cases)

        def content() -> dict[str, Any]:
            replays = [case.to_dump() for case in cases]
            return {"trip": dataclasses.asdict(trip), "replica": status, "replays": replays}

        self.dump(f"trip {trip.reason}", content)
        return num_suspect

    def overview(self) -> dict[str, Any]:
        """The latest replays' results, and trips and alarms, newest first."""
        return {"latest": list(self._latest), "incidents": self.incidents.to_wire()}

    def dump(self, reason: str, content: Callable[[], dict[str, Any]]) -> None:
        """Have a thread write a dump, where there is a folder for it."""
        if self.dumps.enabled:
            asyncio.get_running_loop().run_in_executor(None, lambda: self.dumps.write(reason, content()))
