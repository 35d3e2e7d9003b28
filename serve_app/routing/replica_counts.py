"""Counts of each pool's replicas: present, wanted and replaced, as Ray Serve reports them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serve_app.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of one pool, as Ray Serve reports it: names of replicas, and whether it is about to change their number
    or code."""

    wanted: int
    running: frozenset[str]
    moving: frozenset[str] = frozenset()  # those that leave a node which is drained
    changing: bool = False


class ReplicaCounts:
    """Sets the gauges of replicas wanted and running, and counts restarts.

    A replica that ran when the pool was last looked at and does not run now was lost, unless its node was drained, or
    the pool was deployed or scaled meanwhile.

    Args:
        metrics_of: the metrics of a pool.
    """

    def __init__(self, metrics_of: Callable[[str], Metrics]) -> None:
        self._metrics_of = metrics_of
        self._seen: dict[str, PoolState] = {}

    def note(self, pools: Mapping[str, PoolState]) -> None:
        """Take in the present state of all pools; call this every few seconds."""
        for pool, state in pools.items():
            metrics = self._metrics_of(pool)
            metrics.gauge("truespec_replicas_wanted", state.wanted)
            metrics.gauge("truespec_replicas_running", len(state.running))
            metrics.count("truespec_replica_restarts_total", _lost(self._seen.get(pool), state))
        self._seen = dict(pools)


def _lost(before: PoolState | None, now: PoolState) -> int:
    if before is None or before.changing or now.changing or now.wanted < before.wanted:
        return 0
    return len(before.running - before.moving - now.running)
