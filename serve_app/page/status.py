"""What the status page shows of the whole app, as plain JSON; it holds no prompt and no answer."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from serve_app.telemetry.metric_names import REPLICA_LABEL, STRATA
from serve_app.telemetry.metrics import Sample
from speculative.stats import CHECKS

_HISTORY_S = 300  # one point a second

# What a point of the history holds: sums since the start, by the metric they come from. Strata overlap: only `all`.
_COURSE = {
    "emitted": "truespec_emitted_tokens_total",
    "drafts": "truespec_drafts_total",
    "drafted": "truespec_draft_tokens_total",
    "accepted": "truespec_accepted_tokens_total",
    "expected": "truespec_expected_accepted_tokens_total",
    "achievable": "truespec_achievable_accepted_tokens_total",
    "replayed": "truespec_replay_tokens_total",
    "excess": "truespec_replay_tme_excess_total",
    "running": "truespec_requests_running",
    "waiting": "truespec_requests_waiting",
}
_GAUGES = {
    "running": "truespec_requests_running",
    "waiting": "truespec_requests_waiting",
    "replaying": "truespec_replays_running",
    "kv_usage": "truespec_kv_cache_usage_ratio",
    "speculating": "truespec_speculation_enabled",
}
_GROUPS = {  # field -> metric, label
    "requests": ("truespec_requests_total", "outcome"),
    "replays": ("truespec_replays_total", "result"),
    "verdicts": ("truespec_verdicts_total", "verdict"),
    "distributions": ("truespec_replay_distributions_total", "distribution"),
    "handoffs": ("truespec_handoffs_total", "result"),
    "trips": ("truespec_breaker_trips_total", "reason"),
    "canaries": ("truespec_canaries_total", "result"),
    "replay_alarms": ("truespec_replay_alarms_total", "alarm"),
    "check_alarms": ("truespec_selfcheck_alarms_total", "check"),
    "logprob_violations": ("truespec_logprob_violations_total", "kind"),
    "invariant_violations": ("truespec_selfcheck_violations_total", "kind"),
}


class StatusBook:
    """The history of the last minutes, and the current status.

    Args:
        about: what is served and how, as the page shows it.
        clock: unix seconds.
    """

    def __init__(self, about: Mapping[str, Any], clock: Callable[[], float]) -> None:
        self._about = dict(about)
        self._clock = clock
        self._started_at = clock()
        self._points: deque[dict[str, float]] = deque(maxlen=_HISTORY_S)

    def note(self, samples: Iterable[Sample]) -> None:
        """Add a point to the history; call this once a second."""
        totals = _totals(samples)
        self._points.append({"at": self._clock()} | {key: totals.get(name, 0.0) for key, name in _COURSE.items()})

    def render(self, samples: Iterable[Sample], overview: Mapping[str, Any]) -> dict[str, Any]:
        """The page's data.

        Args:
            samples: what the app counted.
            overview: replicas and latest replays, as the referee reports them.
        """
        samples = list(samples)
        gauges = _by_replica(samples)
        replicas = [one | gauges.get(str(one[REPLICA_LABEL]), {}) for one in overview["replicas"]]
        return {
            "about": self._about,
            "started_at": self._started_at,  # the sums start here
            "at": self._clock(),
            "replicas": replicas,
            **{field: sum(one.get(field, 0.0) for one in replicas) for field in ("running", "waiting", "replaying")},
            "latest": overview["latest"],
            "positions": _positions(samples),
            "strata": _strata(samples),
            "check_meanings": CHECKS,
            **{field: _by_label(samples, *group) for field, group in _GROUPS.items()},
            "history": list(self._points),
        }


def _totals(samples: Iterable[Sample]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, labels, value in samples:
        if labels.get("stratum", "all") == "all":
            totals[name] = totals.get(name, 0.0) + value
    return totals


def _by_label(samples: Iterable[Sample], metric: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, labels, value in samples:
        if name == metric and labels.get("stratum", "all") == "all":
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
    return sums


def _by_replica(samples: Iterable[Sample]) -> dict[str, dict[str, float]]:
    fields = {metric: field for field, metric in _GAUGES.items()}
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in samples:
        if name in fields:
            found.setdefault(labels[REPLICA_LABEL], {})[fields[name]] = value
    return found


def _positions(samples: list[Sample]) -> list[dict[str, float]]:
    """Drafted and accepted tokens at each position of a round."""
    drafted = _by_label(samples, "truespec_draft_tokens_per_position_total", "position")
    accepted = _by_label(samples, "truespec_accepted_tokens_per_position_total", "position")
    return [
        {"drafted": drafted[position], "accepted": accepted.get(position, 0.0)} for position in sorted(drafted, key=int)
    ]


def _strata(samples: list[Sample]) -> list[dict[str, Any]]:
    """The drift of each stratum in which something was replayed."""
    sums: dict[str, dict[str, float]] = {stratum: {} for stratum in STRATA}
    for name, labels, value in samples:
        if (stratum := labels.get("stratum")) in sums:
            own, key = sums[stratum], name + labels.get("nats", "")
            own[key] = own.get(key, 0.0) + value
    reported = []
    for stratum, own in sums.items():
        tokens = own.get("truespec_replay_tokens_total", 0.0)
        if tokens > 0:
            reported.append(
                {
                    "stratum": stratum,
                    "meaning": STRATA[stratum],
                    "tokens": tokens,
                    "tme": 1 + own["truespec_replay_tme_excess_total"] / tokens,
                    "alarms": own.get("truespec_replay_alarms_total", 0.0),
                }
            )
    return reported
