"""Messages between a replica and the referee, about once a second.

The replica calls and the referee answers, so that neither needs to find the other; what the referee has found out
reaches the replica with the answer to its next report.
"""

from dataclasses import dataclass, field

from serve_app.backends.base import Computing
from serve_app.cluster.desired_state import DesiredState, WeightsStatus
from serve_app.guard.breaker import BreakerState, Mode
from serve_app.guard.rehearsal import Rehearsal
from serve_app.referee.book.replica_book import Finding
from serve_app.referee.judge.verdicts import Finished, Trip
from serve_app.telemetry.metrics import MetricBatch
from speculative.stats import CheckState


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of a replica's breaker, as it is reported, and as an operator sees it."""

    replica: str
    pool: str
    breaker: BreakerState
    mode: Mode
    since: float  # of the last change; what requests from before it show says nothing about the replica as it is now
    reason: str  # of the last trip, "" = none
    rehearsal: Rehearsal | None = None  # the latest

    @property
    def decodes_plainly(self) -> bool:
        """Return whether nothing is drafted there, for clients or otherwise."""
        stopped = self.mode is Mode.AUTO and self.breaker in (BreakerState.OPEN, BreakerState.OUT)
        return stopped or self.mode is Mode.OFF


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a replica: version, the node's host name and its id in `ray list nodes`, since when."""

    version: str = ""
    node: str = ""
    node_id: str = ""
    started_at: float = 0.0  # unix seconds


@dataclass(frozen=True, slots=True)
class Report:
    """From a replica."""

    status: ReplicaStatus
    batch: MetricBatch
    finished: tuple[Finished, ...] = ()
    trips: tuple[Trip, ...] = ()
    checks: tuple[CheckState, ...] = ()
    weights: WeightsStatus | None = None
    computing: Computing = field(default_factory=Computing)
    placed: Placed = field(default_factory=Placed)


@dataclass(frozen=True, slots=True)
class Orders:
    """The referee's answer to a report."""

    findings: tuple[Finding, ...] = ()
    mode: Mode | None = None  # what an operator wants; None = nothing new
    weights: DesiredState | None = None  # which to serve; None = no change
    rehearse: bool = False
