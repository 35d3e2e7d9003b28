"""What the referee knows of each replica: its status, what replays show about it, its trips, and verdicts on answers.

Each replica has its own detectors, one per stratum; their findings go to the replica's breaker with the answer to its
next report.
"""

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.backends.base import Computing, Replayed
from serve_app.referee.answer import Answer
from serve_app.referee.breaker import Mode, Trip
from serve_app.referee.detectors import Alarm, ReplicaWatch, SeenToken
from serve_app.referee.dumps import DumpFolder
from serve_app.referee.heartbeat import Finding, Orders, Placed, ReplicaStatus, Report
from serve_app.referee.incidents import IncidentKind, IncidentLog
from serve_app.referee.strata import SERVED_STRATA
from serve_app.referee.tolerance import Tolerance
from serve_app.referee.verdicts import Checked, Distribution, Verdict, VerdictBook
from serve_app.telemetry.metric_names import REPLAY_ALARMS
from serve_app.telemetry.metrics import Metrics
from speculative.stats import CheckState

_logger = logging.getLogger("truespec.referee")

_KEPT_CASES = 8  # of each replica, for a dump
_KEPT_LATEST = 12
_FORGOTTEN_AFTER_S = 60.0  # a replica that has not reported for so long is gone


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


@dataclass(slots=True)
class _Replica:
    """What is known of a replica."""

    watch: ReplicaWatch
    status: ReplicaStatus | None = None
    heard_at: float = 0.0
    findings: deque[Finding] = dataclasses.field(default_factory=lambda: deque(maxlen=16))
    cases: deque[Case] = dataclasses.field(default_factory=lambda: deque(maxlen=_KEPT_CASES))
    ordered: Mode | None = None
    checks: tuple[CheckState, ...] = ()  # of its engine
    computing: Computing = dataclasses.field(default_factory=Computing)
    placed: Placed = dataclasses.field(default_factory=Placed)

    def trusts(self, began_at: float) -> bool:
        """Whether a request of that time is evidence about the replica as it is now."""
        return self.status is None or began_at >= self.status.since


class ReplicaBook:
    """Reports of replicas in, orders out; and `verdicts` on what they answered.

    Args:
        metrics: alarms, verdicts, dumps.
        tolerance: between the engines that answer and those that replay.
        dumps: where a post-mortem is written.
        keep_verdicts: replies whose verdicts are kept.
        strata: those of the answers.
        alarmed: called with each alarm, the replica that raised it and the answer that completed its evidence.
        clock: unix seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        tolerance: Tolerance,
        dumps: DumpFolder | None = None,
        keep_verdicts: int = 10_000,
        *,
        strata: Iterable[str] = SERVED_STRATA,
        alarmed: Callable[[Alarm, str, Case], None] = lambda alarm, replica, case: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._tolerance = tolerance
        self.strata = tuple(strata)
        self._dumps = dumps or DumpFolder(None, 0, 0)
        self._alarmed = alarmed
        self._clock = clock
        self.verdicts = VerdictBook(keep_verdicts)
        self.incidents = IncidentLog(clock)
        self._replicas: dict[str, _Replica] = {}
        self._mode: Mode | None = None  # ordered for all replicas, including future ones
        self._latest: deque[dict[str, Any]] = deque(maxlen=_KEPT_LATEST)  # results of the latest replays
        for verdict in Verdict:
            metrics.count("truespec_verdicts_total", 0, verdict=verdict.value)
        for distribution in Distribution:
            metrics.count("truespec_replay_distributions_total", 0, distribution=distribution.value)
        for stratum in self.strata:
            for alarm in REPLAY_ALARMS:
                metrics.count("truespec_replay_alarms_total", 0, alarm=alarm, stratum=stratum)
        metrics.count("truespec_dumps_total", 0)

    # -- replays ------------------------------------------------------------------------------------------------

    def add(self, case: Case, tokens: Sequence[SeenToken], drift_tolerance: float) -> Checked:
        """Show an answer's tokens to the detectors of the replicas that made them. Returns what to report of it.

        What a prefill replica made is its own. What a decode replica makes from a handoff may be wrong because of
        either, if speculation cannot be the cause: nothing at all was drafted there.
        """
        answer = case.answer
        makers: dict[str, list[SeenToken]] = {}
        for token, since in zip(
            tokens, [*[None] * len(answer.prompt_logprobs), *answer.rounds_since_handoff], strict=True
        ):
            makers.setdefault(token.made_by, []).append(token)
            if since is not None and self._decoded_plainly(token.made_by, answer.began_at):
                makers.setdefault(answer.prefilled_by, []).append(token)
        greedy = answer.request.params.greedy
        for name, own in makers.items():
            replica = self._known(name)
            replica.cases.append(case)
            if replica.trusts(answer.began_at):
                seen = replica.watch.see(own, greedy=greedy, drift_tolerance=drift_tolerance, at=answer.began_at)
                for found in seen:
                    self._alarm(name, replica, found, case)
        return self._record(case)

    def add_impossible(self, case: Case) -> Checked:
        """An answer that no engine takes is an alarm for each replica that made it. Returns what to report of it."""
        for name in sorted(set(case.answer.made_by)):
            replica = self._known(name)
            replica.cases.append(case)
            if replica.trusts(case.answer.began_at):
                self._alarm(name, replica, Alarm("impossible", "all", case.answer.began_at), case)
        return self._record(case)

    def _record(self, case: Case) -> Checked:
        """Record a replay; returns what to report of the answer."""
        self._metrics.count("truespec_replay_distributions_total", distribution=case.checked.distribution.value)
        return self.report(case)

    def report(self, case: Case) -> Checked:
        """Record a verdict, in the place of an earlier one on the same answer. Returns what to report of the answer."""
        answer, checked = case.answer, case.checked
        reported = self.verdicts.record(answer, checked, self._clock())
        self._latest.appendleft({"at": self._clock(), "replica": answer.replica, **reported.to_wire()})
        self._metrics.count("truespec_verdicts_total", verdict=reported.verdict.value)
        if checked.verdict is Verdict.SUSPECT:
            _logger.warning("%s of %s is suspect: %s", answer.request.request_id, answer.replica, checked.reason)
            self._dump(checked.reason, case.to_dump)
        return reported

    def _alarm(self, name: str, replica: _Replica, found: Alarm, case: Case) -> None:
        """Count an alarm, and notify the replica with the answer to its next report."""
        self._metrics.count("truespec_replay_alarms_total", alarm=found.name, stratum=found.stratum)
        self.incidents.note("replay", found.name, name, strata=(found.stratum,))
        _logger.warning("replays show that %s is wrong: %s in stratum %s", name, found.name, found.stratum)
        replica.findings.append(Finding(name, found.name, found.stratum, case.answer.began_at, found.evidence_since))
        self._alarmed(found, name, case)

    def _decoded_plainly(self, name: str, began_at: float) -> bool:
        """Whether a replica drafted nothing at all for what began then (unix seconds)."""
        status = self._known(name).status
        return status is not None and status.decodes_plainly and began_at > status.since

    def _known(self, name: str) -> _Replica:
        if name not in self._replicas:
            self._replicas[name] = _Replica(ReplicaWatch(self._tolerance), heard_at=self._clock(), ordered=self._mode)
        return self._replicas[name]

    # -- reports and queries --------------------------------------------------------------------------------------

    def hear(self, report: Report) -> Orders:
        """Process a replica's report, and answer it."""
        now, name = self._clock(), report.status.replica
        replica = self._known(name)
        if replica.status is not None and replica.status.since != report.status.since:
            replica.watch = ReplicaWatch(self._tolerance)
            replica.findings.clear()
        replica.status, replica.heard_at, replica.checks = report.status, now, report.checks
        replica.computing, replica.placed = report.computing, report.placed
        self.incidents.count(name, report.batch.counters)
        for finished in report.finished:
            self.verdicts.note(name, finished)
        for trip in report.trips:
            self._on_trip(name, replica, trip)
        self._replicas = {key: one for key, one in self._replicas.items() if one.heard_at > now - _FORGOTTEN_AFTER_S}
        findings, mode = tuple(replica.findings), replica.ordered
        replica.findings.clear()
        replica.ordered = None
        return Orders(findings, mode)

    def order(self, mode: Mode, name: str | None) -> list[dict[str, object]] | None:
        """Set who decides about speculation, for one replica, or for all including future ones.

        Returns every replica's status; None if there is no such replica.
        """
        if name is not None and name not in self._replicas:
            return None
        if name is None:
            self._mode = mode
        for key, replica in self._replicas.items():
            if name in (None, key):
                replica.ordered = mode
        return self.statuses()

    def statuses(self) -> list[dict[str, object]]:
        """Every replica's status."""
        return [one.status.to_wire() for _, one in sorted(self._replicas.items()) if one.status is not None]

    def overview(self) -> dict[str, Any]:
        """Replicas with their place, device, kernels and self-checks; the latest replays' results, trips and alarms,
        newest first."""
        return {
            "replicas": [
                one.status.to_wire()
                | {"checks": [dataclasses.asdict(check) for check in one.checks]}
                | {name: getattr(one.computing, name) for name in ("device", "kernels", "kernels_off")}
                | dataclasses.asdict(one.placed)
                for _, one in sorted(self._replicas.items())
                if one.status is not None
            ],
            "latest": list(self._latest),
            "incidents": self.incidents.to_wire(),
        }

    def _on_trip(self, name: str, replica: _Replica, trip: Trip) -> None:
        kind: IncidentKind = "canary" if trip.reason == "canary" else "trip"
        self.incidents.note(kind, trip.reason, name, at=trip.at, suspect_since=trip.suspect_since)
        num_suspect = self.verdicts.trip(name, trip)
        self._metrics.count("truespec_verdicts_total", num_suspect, verdict=Verdict.SUSPECT.value)
        _logger.error("%s tripped (%s); %d of its answers are suspect", name, trip.reason, num_suspect)
        status, cases = replica.status, tuple(replica.cases)

        def content() -> dict[str, Any]:
            return {
                "trip": dataclasses.asdict(trip),
                "replica": None if status is None else status.to_wire(),
                "replays": [case.to_dump() for case in cases],
            }

        self._dump(f"trip {trip.reason}", content)

    def _dump(self, reason: str, content: Callable[[], dict[str, Any]]) -> None:
        if self._dumps.enabled:
            asyncio.get_running_loop().run_in_executor(None, self._write, reason, content)

    def _write(self, reason: str, content: Callable[[], dict[str, Any]]) -> None:
        if self._dumps.write(reason, content()) is not None:
            self._metrics.count("truespec_dumps_total")
