"""The last hour in figures, of every tenth second: rates, latencies and acceptance over the minute before it."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from serve_app.telemetry.metric_names import METRICS
from serve_app.telemetry.metrics import BucketCounts, Sample

EVERY_S = 10.0
_NUM_POINTS = 360  # an hour
_MINUTE = 6  # points
_SHORTEST_S = 1.0  # over which a rate is taken: just after the start, and when the clock was set back

LATENCIES = {"first_token": "truespec_time_to_first_token_seconds", "per_token": "truespec_inter_token_latency_seconds"}

_SUMS = {  # field -> counter. Strata overlap: only `all`
    "emitted": "truespec_emitted_tokens_total",
    "drafts": "truespec_drafts_total",
    "drafted": "truespec_draft_tokens_total",
    "accepted": "truespec_accepted_tokens_total",
    "expected": "truespec_expected_accepted_tokens_total",
    "achievable": "truespec_achievable_accepted_tokens_total",
    "replayed": "truespec_replay_tokens_total",
    "excess": "truespec_replay_tme_excess_total",
}
_GAUGES = {"running": "truespec_requests_running", "waiting": "truespec_requests_waiting"}
_DENIED = ("unauthenticated", "forbidden")  # refusals with 401 and 403; all others are 429

Point = dict[str, float | None]


class Counted(Protocol):
    """What the whole app counted since the start; sums never fall, whichever replicas come and go."""

    def samples(self) -> list[Sample]:
        """Counters and gauges."""
        ...

    def histogram(self, name: str) -> BucketCounts:
        """A histogram over all its labels."""
        ...


@dataclass(frozen=True, slots=True)
class Sums:
    """What had been counted at a time."""

    at: float
    counts: dict[str, float]
    latencies: dict[str, Sequence[int]]  # observations by bucket
    drafted_at: dict[str, float]  # by position
    accepted_at: dict[str, float]


class History:
    """Figures of the last hour, in bounded memory.

    Args:
        counted: what is counted.
        clock: unix seconds.
    """

    def __init__(self, counted: Counted, clock: Callable[[], float]) -> None:
        self._counted = counted
        self._clock = clock
        self._sums: deque[Sums] = deque([self._take()], maxlen=_NUM_POINTS + 1)
        self._points: deque[Point] = deque(maxlen=_NUM_POINTS)

    def note(self) -> None:
        """Add a point if it is time for one."""
        if not 0 <= self._clock() - self._sums[-1].at < EVERY_S:
            sums = self._take()
            self._points.append(_figures(self._minute_ago(), sums))
            self._sums.append(sums)

    def newest(self) -> dict[str, Any]:
        """Figures of the last minute, sums since the start, and by position what was drafted in the last hour."""
        sums, hour_ago = self._take(), self._sums[0]
        return {
            "now": _figures(self._minute_ago(), sums),
            "totals": {field: sums.counts[field] for field in _SUMS},
            "positions": [
                {
                    "drafted": sums.drafted_at[place] - hour_ago.drafted_at.get(place, 0.0),
                    "accepted": sums.accepted_at.get(place, 0.0) - hour_ago.accepted_at.get(place, 0.0),
                }
                for place in sorted(sums.drafted_at, key=int)
            ],
        }

    def columns(self) -> dict[str, Any]:
        """All points, as one list a figure: a third of the size of a list of points."""
        names = _figures(self._sums[0], self._sums[0])
        return {"every_s": EVERY_S, "points": {name: [point[name] for point in self._points] for name in names}}

    def _minute_ago(self) -> Sums:
        return self._sums[max(0, len(self._sums) - _MINUTE)]

    def _take(self) -> Sums:
        samples = self._counted.samples()
        return Sums(
            self._clock(),
            _counts(samples),
            {field: self._counted.histogram(name).counts for field, name in LATENCIES.items()},
            by_label(samples, "truespec_draft_tokens_per_position_total", "position"),
            by_label(samples, "truespec_accepted_tokens_per_position_total", "position"),
        )


def by_label(samples: Iterable[Sample], metric: str, label: str) -> dict[str, float]:
    """A metric's sums over all its other labels."""
    sums: dict[str, float] = {}
    for name, labels, value in samples:
        if name == metric and labels.get("stratum", "all") == "all":
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
    return sums


def quantile(share: float, counts: Sequence[int], bounds: Sequence[float]) -> float | None:
    """A quantile from a histogram, linear within its bucket, as Prometheus computes it; None where it is empty.

    Args:
        share: 0.5 for the median.
        counts: observations in each bucket; the last has no upper bound, and counts as the highest bound.
        bounds: the others' upper bounds.
    """
    cumulative = list(accumulate(counts))
    if not cumulative[-1]:
        return None
    rank = share * cumulative[-1]
    index = bisect_left(cumulative, rank)
    if index == len(bounds):
        return bounds[-1]
    lower = bounds[index - 1] if index else 0.0
    below = cumulative[index - 1] if index else 0
    return lower + (bounds[index] - lower) * (rank - below) / counts[index]


def _counts(samples: list[Sample]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, labels, value in samples:
        if labels.get("stratum", "all") == "all":
            totals[name] = totals.get(name, 0.0) + value
    outcomes = by_label(samples, "truespec_requests_total", "outcome")
    refusals = by_label(samples, "truespec_refusals_total", "reason")
    return {field: totals.get(name, 0.0) for field, name in (_SUMS | _GAUGES).items()} | {
        "finished": sum(value for outcome, value in outcomes.items() if outcome != "rejected"),
        "failed": outcomes.get("error", 0.0),
        "refused": sum(value for reason, value in refusals.items() if reason not in _DENIED),
    }


def _figures(first: Sums, last: Sums) -> Point:
    """What happened between two times."""
    seconds = max(last.at - first.at, _SHORTEST_S)
    grown = {field: value - first.counts[field] for field, value in last.counts.items()}
    drafted = grown["drafted"]
    figures: Point = {
        "requests_per_s": grown["finished"] / seconds,
        "tokens_per_s": grown["emitted"] / seconds,
        "refused": grown["refused"],
        "failed": grown["failed"],
        "running": last.counts["running"],
        "waiting": last.counts["waiting"],
        "acceptance": grown["accepted"] / drafted if drafted else None,
        "expected_acceptance": grown["expected"] / drafted if drafted else None,
        "achievable_acceptance": grown["achievable"] / drafted if drafted else None,
        **_latencies("first_token", first, last),
        **_latencies("per_token", first, last),
    }
    return {"at": round(last.at, 1)} | {name: _short(value) for name, value in figures.items()}


def _latencies(field: str, first: Sums, last: Sums) -> Point:
    counts = [after - before for before, after in zip(first.latencies[field], last.latencies[field], strict=True)]
    bounds = METRICS[LATENCIES[field]].buckets
    return {f"{field}_p{100 * share:g}_s": quantile(share, counts, bounds) for share in (0.5, 0.95)}


def _short(value: float | None) -> float | None:
    """Four digits are enough to draw."""
    return None if value is None else float(f"{value:.4g}")
