"""The reports of replicas, and the orders that answer them."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.guard.breaker import BreakerState, Mode
from serve_app.guard.heartbeat import Orders, Report
from serve_app.guard.referee_counts import RefereeCounts
from serve_app.referee.book.incidents import IncidentKind
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.telemetry.metrics import MetricBatch

_FORGOTTEN_AFTER_S = 60.0  # a replica that has not reported for so long is gone
_SILENT_AFTER_S = 5.0  # what was to be sent in the meantime may be lost

_ALARM_COUNTERS: dict[str, IncidentKind] = {  # of a replica; their last label names the alarm
    "truespec_selfcheck_alarms_total": "selfcheck",
    "truespec_selfcheck_violations_total": "invariant",
    "truespec_logprob_violations_total": "logprobs",
}


@dataclass(slots=True)
class _Replica:
    """A replica's last report; what was ordered since."""

    report: Report
    reported_at: float
    ordered: Mode | None = None
    rehearse: bool = False


@dataclass(slots=True)
class ReplicaRegistry:
    """Reports of replicas in, orders out. What concerns their answers goes on to the referee's book."""

    book: ReplicaBook  # gets finished requests, trips and alarms; its findings reach the replicas' breakers
    counts: RefereeCounts  # of the answers that trips made suspect
    # of each report, and whether the replica's report before it came just before
    heard: Callable[[Report, bool], None] = lambda report, in_time: None
    clock: Callable[[], float] = time.time  # unix seconds
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    # of a replica, a router too: when it reported, and requests of clients by stage
    _requests: dict[str, tuple[float, dict[str, int]]] = field(default_factory=dict)
    _mode: Mode | None = None  # ordered for all replicas, including future ones

    def on_heartbeat(self, report: Report) -> Orders:
        """Process a replica's report, and answer it."""
        now, status, book = self.clock(), report.status, self.book
        name = status.replica
        known = self._replicas.get(name)
        ordered = self._mode if known is None else known.ordered
        self._replicas[name] = _Replica(report, now)
        self.note_requests(report.batch)
        self.heard(report, known is not None and now - known.reported_at < _SILENT_AFTER_S)
        for (metric, labels), value in report.batch.counters.items():
            kind = _ALARM_COUNTERS.get(metric)
            if kind is not None and value > 0:
                book.incidents.note(kind, labels[-1], name, num=value)
        for finished in report.finished:
            book.verdicts.note(name, finished)
        for trip in report.trips:
            self.counts.tripped(book.trip(name, trip, dataclasses.asdict(status)))
        book.observe(name, since=status.since, plain=status.decodes_plainly)
        gone = now - _FORGOTTEN_AFTER_S
        self._replicas = {key: one for key, one in self._replicas.items() if one.reported_at > gone}
        book.forget(gone)
        return Orders(book.take_findings(name), ordered, rehearse=known is not None and known.rehearse)

    def note_requests(self, batch: MetricBatch) -> None:
        """Note which requests of clients are on a replica, which may be a router without a breaker."""
        now, gauges = self.clock(), batch.gauges.items()
        stages = {labels[-1]: int(value) for (name, labels), value in gauges if name == "truespec_requests_in_flight"}
        self._requests[batch.source] = (now, stages)
        self._requests = {key: one for key, one in self._requests.items() if one[0] > now - _FORGOTTEN_AFTER_S}

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

    def rehearse(self, name: str | None) -> list[dict[str, object]] | None:
        """Have one replica rehearse from its next report on: this one, or any that can.

        Returns every replica's status; None where it cannot.
        """
        ready = []
        for key, one in sorted(self._replicas.items()):
            status = one.report.status
            speculates = status.breaker is BreakerState.CLOSED and status.mode is Mode.AUTO and status.pool != "prefill"
            is_busy = one.rehearse or (status.rehearsal is not None and status.rehearsal.state == "running")
            if name in (None, key) and speculates and not is_busy:
                ready.append(one)
        if not ready:
            return None
        ready[0].rehearse = True
        return self.statuses()

    def requests_on(self, name: str) -> Mapping[str, int]:
        """Return how many requests of clients a replica had when it last reported, by stage; none if it is unknown."""
        return self._requests.get(name, (0.0, {}))[1]

    def statuses(self) -> list[dict[str, object]]:
        """Every replica's status."""
        return [dataclasses.asdict(one.report.status) for _, one in sorted(self._replicas.items())]

    def overview(self) -> dict[str, Any]:
        """Replicas with their place, device, kernels and self-checks, and the overview of the referee's book."""
        reports = [one.report for _, one in sorted(self._replicas.items())]
        replicas = [
            dataclasses.asdict(report.status)
            | {"checks": [dataclasses.asdict(check) for check in report.checks]}
            | {name: getattr(report.computing, name) for name in ("device", "kernels", "kernels_off")}
            | dataclasses.asdict(report.placed)
            for report in reports
        ]
        return {"replicas": replicas, **self.book.overview()}
