"""The number of replicas that a pool needs, from what each of them says of its load.

A load is a share of a target: at 1 a replica has as much to do as it should have. A prefill replica's load is
the seconds that its backlog takes to drain; a decode replica's the larger of its KV use and its running requests.
Ray Serve collects what replicas record, asks the policy, and adds delays and bounds. It brings the policy to its
controller, so this module imports nothing that is not everywhere.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

_CALM = 0.8  # a replica goes only where the others then have at most this load
_KEPT = 0.7  # of the measured rate, when a new second of work is added to it


def loads(metrics: Mapping[str, Mapping[Any, float]], targets: Mapping[str, float]) -> dict[Any, float]:
    """Each replica's load: the largest of what it recorded, in shares of the targets.

    Args:
        metrics: by name, and by replica.
        targets: by name; what has none does not count.
    """
    found: dict[Any, float] = {}
    for name, target in targets.items():
        for replica, value in metrics.get(name, {}).items():
            found[replica] = max(found.get(replica, 0.0), value / target)
    return found


def wanted_replicas(replica_loads: Mapping[Any, float], current: int) -> int:
    """Return the fewest replicas whose loads keep to their target; fewer than now only if those left stay calm.

    Where no replica has said anything, nothing changes.
    """
    if not replica_loads:
        return current
    total = sum(replica_loads.values())
    up = max(1, math.ceil(total - 1e-9))
    if up >= current:
        return up
    return min(current, max(1, math.ceil(total / _CALM - 1e-9)))


class LoadPolicy:
    """Ray Serve's autoscaling policy for one pool. `targets` are what a replica should have at most, by name."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = dict(targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, and no state."""
        recorded = loads(context.aggregated_metrics or {}, self._targets)
        return wanted_replicas(recorded, context.target_num_replicas), {}


class PrefillBacklog:
    """Prompts that a prefill replica has been given and has not computed, and how long they will take it."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._rate = 0.0  # tokens a second of work; 0 = not known yet

    @contextlib.contextmanager
    def holding(self, num_tokens: int) -> Iterator[None]:
        """Within it, a prompt of so many tokens waits or is computed."""
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_tokens -= num_tokens

    def observe(self, num_tokens: int, work_s: float) -> None:
        """Take in what the engine did lately: prompt tokens, those found in the prefix cache included, and the seconds
        it worked on them."""
        if num_tokens > 0 and work_s > 0:
            kept = _KEPT ** min(1.0, work_s) if self._rate else 0.0
            self._rate = kept * self._rate + (1 - kept) * num_tokens / work_s

    @property
    def seconds(self) -> float:
        """Until the backlog is computed; 0 before anything was measured."""
        return self.num_tokens / self._rate if self._rate else 0.0
