"""Reports of replicas to the controller, and what it makes of all of them together."""

import dataclasses
from typing import Any

from serve_app.cluster.desired_state import DesiredState
from serve_app.cluster.weight_coordinator import WeightCoordinator
from serve_app.guard.heartbeat import Orders, Report
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.http.page.status import StatusBook
from serve_app.telemetry.metrics import MetricBatch, PrometheusSink


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaReports:
    """Gives each part of a report to whom it concerns, and collects the orders that answer it."""

    sums: PrometheusSink  # what the whole app counted
    registry: ReplicaRegistry  # trips, finished requests and self-checks, by replica
    weights: WeightCoordinator  # which weights each replica serves and is to serve
    page: StatusBook

    def count(self, batch: MetricBatch) -> None:
        """Take in what a replica without an engine counted."""
        self.sums.apply(batch)
        self.registry.note_requests(batch)

    def report(self, report: Report) -> Orders:
        """Take in what a replica counted and did, and answer with what it is to do."""
        self.sums.apply(report.batch)
        orders = self.registry.on_heartbeat(report)
        if report.weights is None:
            return orders
        return dataclasses.replace(orders, weights=self.weights.on_heartbeat(report.status.replica, report.weights))

    def wanted_weights(self) -> DesiredState:
        """The weights that a replica is to serve which has just started."""
        return self.weights.wanted

    def status(self) -> dict[str, Any]:
        """The data of the status page."""
        return self.page.render(self.registry.overview())
