"""Counts of each pool's replicas: present, wanted and replaced, as Ray Serve reports them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from serve_app.telemetry.metric_names import STAGES
from serve_app.telemetry.metrics import Metrics

RequestsOn = Callable[[str], Mapping[str, int]]
"""How many requests of clients a replica of that name had when it last reported, by stage."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of one pool, as Ray Serve reports it: names of replicas, and whether it is about to change their number
    or code."""

    wanted: int
    running: frozenset[str]
    moving: frozenset[str] = frozenset()  # those that leave a node which is drained
    changing: bool = False


@dataclass(slots=True)
class ReplicaCounts:
    """Sets the gauges of replicas wanted and running, and counts restarts.

    A replica that ran when the pool was last looked at and does not run now was lost, unless its node was drained, or
    the pool was deployed or scaled meanwhile.

    What ran there is counted with it: whoever would have counted its end died, and a proxy that talks to replicas
    counts a stream that was cut as one that went well.
    """

    metrics_of: Callable[[str], Metrics]  # the metrics of a pool
    requests_on: RequestsOn
    _seen: dict[str, PoolState] = field(default_factory=dict)

    def note(self, pools: Mapping[str, PoolState]) -> None:
        """Take in the present state of all pools; call this every few seconds."""
        for pool, state in pools.items():
            metrics = self.metrics_of(pool)
            metrics.gauge("truespec_replicas_wanted", state.wanted)
            metrics.gauge("truespec_replicas_running", len(state.running))
            before, lost = self._seen.get(pool), frozenset[str]()
            if before is not None and not (before.changing or state.changing) and state.wanted >= before.wanted:
                lost = before.running - before.moving - state.running
            metrics.count("truespec_replica_restarts_total", len(lost))
            for stage in () if pool in ("prefill", "proxy") else STAGES:  # others have those requests
                number = sum(self.requests_on(one).get(stage, 0) for one in lost)
                metrics.count("truespec_requests_interrupted_total", number, stage=stage)
        self._seen = dict(pools)
