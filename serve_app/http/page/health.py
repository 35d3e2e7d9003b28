"""Faults of the moment: the page never says "healthy" where an alert would disagree. Alerts wait before they fire and
want a minimum of events; a page that somebody looks at says it at once."""

from collections.abc import Iterator
from typing import Any

from serve_app.http.page.history import History, by_label
from serve_app.http.page.words import runbooks
from serve_app.telemetry.metric_names import FIRST_TOKEN_LIMIT_S, KV_FULL, REPLAY_LAG_LIMIT_S, TURNED_AWAY_LIMIT
from serve_app.telemetry.metrics import Sample

_SHORT_S, _LONG_S = 300.0, 900.0
_LATELY, _SINCE = "in the last 5 minutes", "in the last 15 minutes"


def troubles(history: History, samples: list[Sample], max_first_token_s: float | None) -> list[dict[str, Any]]:
    """Return what is wrong, the worst first: an alert's title, tone (`bad` or `warn`), figures and meaning.

    Args:
        history: counts of the last hour.
        samples: counters and gauges now.
        max_first_token_s: the service's own limit; None = that of the alert.
    """
    late_s = FIRST_TOKEN_LIMIT_S if max_first_token_s is None else max_first_token_s
    found = []
    for alert, figures in _figures(history, samples, late_s):
        said = runbooks()[alert]
        text = f"{figures}. {said.meaning}"
        found.append({"title": said.title, "tone": said.tone, "text": text, "runbook": alert})
    return sorted(found, key=lambda one: one["tone"] != "bad")


def _figures(history: History, samples: list[Sample], late_s: float) -> Iterator[tuple[str, str]]:
    """Yield each alert that is right at the moment, with the figures that say so."""
    lately, long = history.since(_SHORT_S), history.since(_LONG_S)
    running = by_label(samples, "truespec_replicas_running", "pool")
    for pool, wanted in by_label(samples, "truespec_replicas_wanted", "pool").items():
        if (there := running.get(pool, 0.0)) < wanted:
            alert = "TruespecReplicasMissing" if there else "TruespecPoolEmpty"
            alert = "TruespecProxyDown" if pool == "proxy" else alert
            yield alert, f"Pool {pool} runs {there:.0f} of {wanted:.0f} replicas"

    codes, failed = long.by_label["responses"], long.counts["failed"]
    faulty = sum(count for code, count in codes.items() if code.startswith("5") and code != "503")
    if failed or faulty:
        yield "TruespecRequestErrors", f"Failed answers: {failed:,.0f}, responses of 5xx: {faulty:,.0f}, {_SINCE}"

    lost = {f"handoffs {result}": num for result, num in long.by_label["handoffs"].items() if num and result != "ok"}
    lost |= {f"prefills {reason}": num for reason, num in long.by_label["prefill_failures"].items() if num}
    if lost.keys() - {"prefills full"}:  # no failure: the pool took on no more work
        listed = ", ".join(f"{name}: {num:,.0f}" for name, num in lost.items())
        yield "TruespecHandoffsFail", f"{listed.capitalize()}, {_SINCE}"

    p95 = lately.latency("first_token", 0.95)
    if p95 is not None and p95 > late_s:
        yield "TruespecTimeToFirstTokenHigh", f"p95 was {p95:.1f} s {_LATELY}; {late_s:g} s at most are wanted"

    turned_away = long.counts["no_room"] + codes.get("503", 0.0)
    num = max(sum(codes.values()), turned_away)
    if turned_away > TURNED_AWAY_LIMIT * num:
        yield "TruespecRequestsTurnedAway", f"{turned_away:,.0f} of {num:,.0f} requests {_SINCE}"

    if lately.kv_usage is not None and lately.kv_usage > KV_FULL:
        yield "TruespecKvCacheFull", f"At least {lately.kv_usage:.0%} {_LATELY}"

    lag_s = max((value for name, _, value in samples if name == "truespec_replay_lag_seconds"), default=0.0)
    if lag_s > REPLAY_LAG_LIMIT_S:
        yield "TruespecRefereeBehind", f"The oldest answer has waited {lag_s / 60:.0f} minutes"
