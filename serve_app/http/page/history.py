"""The last hour in figures, of every tenth second: rates, latencies and acceptance over the minute before it; and the
last minutes, by reason and by replica."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from serve_app.telemetry.metric_names import METRICS, NO_ROOM
from serve_app.telemetry.metrics import PrometheusSink, Sample

EVERY_S = 10.0
_NUM_POINTS = 360  # an hour
_MINUTE = 6  # points
_MINUTES_BY_REPLICA = 5  # a replica has fewer requests than all
_TIMED_S = 1.0  # of decoding, with less of which the time that drafts save is chance
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
    "speculated_s": "truespec_speculated_seconds_total",
    "speculated_plain_s": "truespec_speculated_plain_seconds_total",
    "cache_queries": "truespec_prefix_cache_queries_total",
    "cache_hits": "truespec_prefix_cache_hits_total",
    "preempted": "truespec_preemptions_total",
}
_BY_LABEL = {  # field -> counter, label
    "drafted_at": ("truespec_draft_tokens_per_position_total", "position"),
    "accepted_at": ("truespec_accepted_tokens_per_position_total", "position"),
    "prefill_failures": ("truespec_prefill_failures_total", "reason"),
    "handoffs": ("truespec_handoffs_total", "result"),
    "responses": ("truespec_http_responses_total", "code"),
}
_KV_USAGE = "truespec_kv_cache_usage_ratio"
_GAUGES = {"running": "truespec_requests_running", "waiting": "truespec_requests_waiting"}
_DENIED = ("unauthenticated", "forbidden")  # refusals with 401 and 403; all others are 429

Point = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Sums:
    """Counts at a time, or over some time."""

    at: float  # its end
    counts: dict[str, float]
    latencies: dict[str, Sequence[int]]  # observations by bucket
    by_label: dict[str, dict[str, float]]  # field -> value of its label -> count
    kv_usage: float | None  # of the fullest replica

    def after(self, first: "Sums") -> "Sums":
        """Return what was counted after `first`."""
        return Sums(
            self.at,
            {field: value - first.counts[field] for field, value in self.counts.items()},
            {field: _grown(first.latencies[field], counts) for field, counts in self.latencies.items()},
            {
                field: {name: value - first.by_label[field].get(name, 0.0) for name, value in own.items()}
                for field, own in self.by_label.items()
            },
            self.kv_usage,
        )

    def latency(self, field: str, share: float) -> float | None:
        """A quantile of one of `LATENCIES`, in seconds; None where there was none."""
        return quantile(share, self.latencies[field], METRICS[LATENCIES[field]].buckets)


class History:
    """Figures of the last hour, in bounded memory.

    Args:
        counted: what the whole app counted since the start; sums never fall, whichever replicas come and go.
        clock: unix seconds.
    """

    def __init__(self, counted: PrometheusSink, clock: Callable[[], float]) -> None:
        self._counted = counted
        self._clock = clock
        self._sums: deque[Sums] = deque([self._take()], maxlen=_NUM_POINTS + 1)
        self._points: deque[Point] = deque(maxlen=_NUM_POINTS)
        self._of_replicas = deque([self._take_replicas()], maxlen=_MINUTES_BY_REPLICA * _MINUTE + 1)

    def note(self) -> None:
        """Add a point if it is time for one."""
        if not 0 <= self._clock() - self._sums[-1].at < EVERY_S:
            sums = self._take()
            self._points.append(_figures(self._minute_ago(), sums))
            self._sums.append(sums)
            self._of_replicas.append(self._take_replicas())

    def newest(self) -> dict[str, Any]:
        """Figures of the last minute, sums since the start, and by position what was drafted in the last hour."""
        sums = self._take()
        hour = sums.after(self._sums[0]).by_label
        return {
            "now": _figures(self._minute_ago(), sums),
            "totals": {field: sums.counts[field] for field in _SUMS},
            "positions": [
                {"drafted": hour["drafted_at"][place], "accepted": hour["accepted_at"].get(place, 0.0)}
                for place in sorted(hour["drafted_at"], key=int)
            ],
        }

    def latencies_by_replica(self) -> dict[str, Point]:
        """Return the latencies of the last minutes, of each replica that answers clients."""
        now, before = self._take_replicas(), self._of_replicas[0]
        found: dict[str, Point] = {}
        for field, own in now.items():
            for replica, counts in own.items():
                grown = _grown(before[field].get(replica, [0] * len(counts)), counts)
                found.setdefault(replica, {}).update(_quantiles(field, grown))
        return found

    def since(self, seconds: float) -> Sums:
        """Return what happened in so many of the last seconds, or since the start.

        Its `kv_usage` is the least in all of the time, of the fullest replica; None = not known for so long.
        """
        now = self._take()
        first = next((sums for sums in self._sums if sums.at >= now.at - seconds), self._sums[-1])
        usages = [sums.kv_usage for sums in (*self._sums, now) if sums.at >= first.at and sums.kv_usage is not None]
        is_covered = self._sums[0].at <= now.at - seconds
        return replace(now.after(first), kv_usage=min(usages, default=None) if is_covered else None)

    def columns(self) -> dict[str, Any]:
        """All points, as one list a figure: a third of the size of a list of points."""
        names = _figures(self._sums[0], self._sums[0])
        return {"every_s": EVERY_S, "points": {name: [point[name] for point in self._points] for name in names}}

    def _minute_ago(self) -> Sums:
        return self._sums[max(0, len(self._sums) - _MINUTE)]

    def _take(self) -> Sums:
        """Return what has been counted by now."""
        samples = self._counted.samples()
        return Sums(
            self._clock(),
            _counts(samples),
            {field: self._counted.histogram(name).counts for field, name in LATENCIES.items()},
            {field: by_label(samples, *group) for field, group in _BY_LABEL.items()},
            max((value for name, _, value in samples if name == _KV_USAGE), default=None),
        )

    def _take_replicas(self) -> dict[str, dict[str, Sequence[int]]]:
        """Observations by bucket: of each kind of latency, and each replica."""
        return {
            field: {replica: own.counts for replica, own in self._counted.histogram_by_source(name).items()}
            for field, name in LATENCIES.items()
        }


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
    cumulative = [0, *accumulate(counts)]
    if not cumulative[-1]:
        return None
    edges, rank = [0.0, *bounds, bounds[-1]], share * cumulative[-1]
    index = bisect_left(cumulative, rank, 1) - 1
    return edges[index] + (edges[index + 1] - edges[index]) * (rank - cumulative[index]) / counts[index]


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
        "no_room": sum(value for reason, value in refusals.items() if reason in NO_ROOM),
    }


def _figures(first: Sums, last: Sums) -> Point:
    """Return what happened between two times."""
    seconds = max(last.at - first.at, _SHORTEST_S)
    happened = last.after(first)
    grown = happened.counts
    drafted = grown["drafted"]
    figures: Point = {
        "requests_per_s": grown["finished"] / seconds,
        "tokens_per_s": grown["emitted"] / seconds,
        "refused": grown["refused"],
        "failed": grown["failed"],
        "running": last.counts["running"],
        "waiting": last.counts["waiting"],
        "kv_usage": last.kv_usage,
        "cache_hit_rate": grown["cache_hits"] / grown["cache_queries"] if grown["cache_queries"] else None,
        "preemptions": grown["preempted"],
        "tokens_per_round": 1 + grown["accepted"] / grown["drafts"] if grown["drafts"] else None,
        "time_saved": 1 - grown["speculated_s"] / plain if (plain := grown["speculated_plain_s"]) >= _TIMED_S else None,
        "acceptance": grown["accepted"] / drafted if drafted else None,
        "expected_acceptance": grown["expected"] / drafted if drafted else None,
        "achievable_acceptance": grown["achievable"] / drafted if drafted else None,
    }
    for field, counts in happened.latencies.items():
        figures |= _quantiles(field, counts)
    return {"at": round(last.at, 1)} | {name: _short(value) for name, value in figures.items()}


def _grown(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [now - then for then, now in zip(before, after, strict=True)]


def _quantiles(field: str, counts: Sequence[int]) -> Point:
    bounds = METRICS[LATENCIES[field]].buckets
    found = {share: quantile(share, counts, bounds) for share in (0.5, 0.95)}
    return {f"{field}_p{100 * share:g}_s": _short(value) for share, value in found.items()}


def _short(value: float | None) -> float | None:
    """Four digits are enough to draw."""
    return None if value is None else float(f"{value:.4g}")
