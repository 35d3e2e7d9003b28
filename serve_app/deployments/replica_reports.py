"""Reports of replicas to the controller, and what it makes of all of them together."""

import dataclasses
from typing import Any

from serve_app.cluster.desired_state import DesiredState
from serve_app.cluster.weight_coordinator import WeightCoordinator
from serve_app.guard.heartbeat import Orders, Report
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.http.page.status import StatusBook
from serve_app.telemetry.metrics import MetricBatch, PrometheusSink


class ReplicaReports:
    """Gives each part of a report to whom it concerns, and collects the orders that answer it.

    Args:
        sums: what the whole app counted.
        registry: trips, finished requests and self-checks, by replica.
        weights: which weights each replica serves and is to serve.
        page: the status page.
    """

    def __init__(
        self, sums: PrometheusSink, registry: ReplicaRegistry, weights: WeightCoordinator, page: StatusBook
    ) -> None:
        self._sums = sums
        self._registry = registry
        self._weights = weights
        self._page = page

    def count(self, batch: MetricBatch) -> None:
        """Take in what a replica without an engine counted."""
        self._sums.apply(batch)
        self._registry.note_requests(batch)

    def report(self, report: Report) -> Orders:
        """Take in what a replica counted and did, and answer with what it is to do."""
        self._sums.apply(report.batch)
        orders = self._registry.on_heartbeat(report)
        if report.weights is None:
            return orders
        return dataclasses.replace(orders, weights=self._weights.on_heartbeat(report.status.replica, report.weights))

    def wanted_weights(self) -> DesiredState:
        """The weights that a replica is to serve which has just started."""
        return self._weights.wanted

    def status(self) -> dict[str, Any]:
        """The data of the status page."""
        return self._page.render(self._registry.overview())
