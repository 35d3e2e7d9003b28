"""The status of the whole app as plain JSON, for the status page; it holds no prompt and no answer."""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.http.page.health import troubles
from serve_app.http.page.history import LATENCIES, History, by_label
from serve_app.http.page.words import LABEL_NAMES, explained
from serve_app.referee.judge.strata import STRATA
from serve_app.telemetry.metric_names import METRICS, REPLICA_LABEL
from serve_app.telemetry.metrics import PrometheusSink, Sample
from speculative.stats import CHECKS

_GAUGES = {  # metric -> field of its replica
    "truespec_requests_running": "running",
    "truespec_requests_waiting": "waiting",
    "truespec_replays_running": "replaying",
    "truespec_kv_cache_usage_ratio": "kv_usage",
    "truespec_speculation_enabled": "speculating",
}
_GROUPS = {  # field -> metric, label
    "requests": ("truespec_requests_total", "outcome"),
    "refusals": ("truespec_refusals_total", "reason"),
    "replays": ("truespec_replays_total", "result"),
    "verdicts": ("truespec_verdicts_total", "verdict"),
    "distributions": ("truespec_replay_distributions_total", "distribution"),
    "handoffs": ("truespec_handoffs_total", "result"),
    "prefill_failures": ("truespec_prefill_failures_total", "reason"),
    "trips": ("truespec_breaker_trips_total", "reason"),
    "canaries": ("truespec_canaries_total", "result"),
    "replay_alarms": ("truespec_replay_alarms_total", "alarm"),
    "check_alarms": ("truespec_selfcheck_alarms_total", "check"),
    "logprob_violations": ("truespec_logprob_violations_total", "kind"),
    "invariant_violations": ("truespec_selfcheck_violations_total", "kind"),
}


class StatusBook:
    """The current status, and the history of the last hour.

    Args:
        about: what is served and how, as the page shows it.
        counted: what the app counted.
        clock: unix seconds.
    """

    def __init__(self, about: Mapping[str, Any], counted: PrometheusSink, clock: Callable[[], float]) -> None:
        self._about = dict(about) | {
            "longest_s": {field: METRICS[name].buckets[-1] for field, name in LATENCIES.items()}
        }
        self._counted = counted
        self._clock = clock
        self._started_at = clock()
        self._history = History(counted, clock)

    def note(self) -> None:
        """Keep the figures of the last minute if it is time; call this about once a second."""
        self._history.note()

    def history(self) -> dict[str, Any]:
        """The figures of the last hour."""
        return {"started_at": self._started_at, **self._history.columns()}

    def render(self, overview: Mapping[str, Any]) -> dict[str, Any]:
        """The page's data. overview: replicas, latest replays and incidents, as the referee reports them."""
        samples = self._counted.samples()
        gauges: dict[str, dict[str, float]] = {}
        for name, labels, value in samples:
            if name in _GAUGES:
                gauges.setdefault(labels[REPLICA_LABEL], {})[_GAUGES[name]] = value
        latencies = self._history.latencies_by_replica()
        replicas = [
            one | gauges.get(one[REPLICA_LABEL], {}) | latencies.pop(one[REPLICA_LABEL], {})
            for one in overview["replicas"]
        ]
        return {
            "about": self._about,
            "started_at": self._started_at,  # the sums start here
            "at": self._clock(),
            "troubles": troubles(self._history, samples, self._about.get("max_first_token_s")),
            "incidents": [explained(incident, self._about.get("shares", {})) for incident in overview["incidents"]],
            "replicas": replicas,
            "routers": [{REPLICA_LABEL: name} | own for name, own in sorted(latencies.items())],  # without an engine
            **{field: sum(one.get(field, 0.0) for one in replicas) for field in ("running", "waiting", "replaying")},
            **self._history.newest(),
            "held_out": _held_out(samples),
            "latest": overview["latest"],
            "strata": _strata(samples),
            "checks": CHECKS,
            "names": LABEL_NAMES,
            **{field: by_label(samples, *group) for field, group in _GROUPS.items()},
        }


def _held_out(samples: list[Sample]) -> dict[str, list[float]]:
    """The share of its drafts that a head had accepted in training, by position; the least of all replicas."""
    least: dict[str, dict[int, float]] = {}
    for name, labels, value in samples:
        if name == "truespec_held_out_acceptance_ratio":
            own, position = least.setdefault(labels["sampling"], {}), int(labels["position"])
            own[position] = min(value, own.get(position, value))
    return {sampling: [own[position] for position in sorted(own)] for sampling, own in least.items()}


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
