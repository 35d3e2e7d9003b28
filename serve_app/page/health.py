"""Faults of the moment, as the alerts know them, in a sentence each: the page never says "healthy" where one of them
would disagree. Alerts wait before they fire and want a minimum of events; a page that somebody looks at says it at
once."""

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.page.history import Happened, History, by_label
from serve_app.page.words import runbook
from serve_app.telemetry.metric_names import FIRST_TOKEN_LIMIT_S, KV_FULL, REPLAY_LAG_LIMIT_S, TURNED_AWAY_LIMIT
from serve_app.telemetry.metrics import Sample

_SHORT_S, _LONG_S = 300.0, 900.0
_SINCE = "in the last 15 minutes"
_LATELY = "in the last 5 minutes"
_FULL = "full"  # no failure of a prefill: the pool took on no more work

Trouble = dict[str, Any]


def troubles(history: History, samples: list[Sample], max_first_token_s: float | None) -> list[Trouble]:
    """Return what is wrong, the worst first: title, tone (`bad` or `warn`), a sentence, and the runbook.

    Args:
        history: counts of the last hour.
        samples: counters and gauges now.
        max_first_token_s: the service's own limit; None = that of the alert.
    """
    now = history.take()
    lately, long = history.since(_SHORT_S, now), history.since(_LONG_S, now)
    found = [
        *_replicas(samples),
        *_errors(long),
        *_prefills(long),
        *_handoffs(long),
        *_first_tokens(lately, FIRST_TOKEN_LIMIT_S if max_first_token_s is None else max_first_token_s),
        *_turned_away(long),
        *_cache(lately),
        *_replays(samples),
    ]
    return sorted(found, key=lambda one: one["tone"] != "bad")


def _trouble(title: str, alert: str, text: str, tone: str = "warn") -> Trouble:
    return {"title": title, "tone": tone, "text": text, "runbook": runbook(f"Truespec{alert}")}


def _replicas(samples: list[Sample]) -> Iterator[Trouble]:
    running = by_label(samples, "truespec_replicas_running", "pool")
    for pool, wanted in by_label(samples, "truespec_replicas_wanted", "pool").items():
        if (there := running.get(pool, 0.0)) < wanted:
            text = f"Pool {pool} runs {there:.0f} of {_plural(wanted, 'replica')}."
            yield (
                _trouble("replicas missing", "ReplicasMissing", text)
                if there
                else _trouble("pool empty", "PoolEmpty", text, "bad")
            )


def _errors(happened: Happened) -> Iterator[Trouble]:
    codes = happened.by_label["responses"]
    failed = happened.counts["failed"]
    faulty = sum(count for code, count in codes.items() if code.startswith("5") and code != "503")
    said = [f"{_plural(failed, 'answer')} ended in an error"] if failed else []
    said += [f"{_plural(faulty, 'response')} had a status of 5xx"] if faulty else []
    if said:
        yield _trouble("errors", "RequestErrors", f"{' and '.join(said)} {_SINCE}.", "bad")


def _prefills(happened: Happened) -> Iterator[Trouble]:
    reasons = {name: count for name, count in happened.by_label["prefill_failures"].items() if count and name != _FULL}
    if reasons:
        text = f"{_plural(sum(reasons.values()), 'prefill')} failed {_SINCE} ({_listed(reasons)}) and had to be "
        yield _trouble("prefills fail", "HandoffsFail", f"{text}computed again: those answers came late.")


def _handoffs(happened: Happened) -> Iterator[Trouble]:
    results = happened.by_label["handoffs"]
    if lost := {name: count for name, count in results.items() if count and name != "ok"}:
        text = f"{sum(lost.values()):,.0f} of {_plural(sum(results.values()), 'handoff')} {_SINCE} did not succeed "
        full = happened.by_label["prefill_failures"].get(_FULL, 0.0)
        why = f", {full:,.0f} because the prefill pool was full" if full else ""
        text += f"({_listed(lost)}{why}): decode replicas computed those prompts themselves, which is slower."
        yield _trouble("handoffs fall back", "HandoffsFail", text)


def _first_tokens(happened: Happened, limit_s: float) -> Iterator[Trouble]:
    p95 = happened.latency("first_token", 0.95)
    if p95 is not None and p95 > limit_s:
        num = _plural(sum(happened.latencies["first_token"]), "request")
        text = (
            f"The first token comes late: p95 is {p95:.1f} s, of {num} {_LATELY}; it should be {limit_s:g} s at most."
        )
        yield _trouble("first token late", "TimeToFirstTokenHigh", text)


def _turned_away(happened: Happened) -> Iterator[Trouble]:
    codes, no_room = happened.by_label["responses"], happened.counts["no_room"]
    turned_away, num = no_room + codes.get("503", 0.0), sum(codes.values())
    if turned_away > TURNED_AWAY_LIMIT * max(num, turned_away):
        text = (
            f"{turned_away:,.0f} of {_plural(max(num, turned_away), 'request')} {_SINCE} were turned away for want of"
        )
        yield _trouble("requests turned away", "RequestsTurnedAway", f"{text} room (429 or 503).")


def _cache(happened: Happened) -> Iterator[Trouble]:
    if happened.kv_usage is not None and happened.kv_usage > KV_FULL:
        text = f"The KV cache of a replica was at least {happened.kv_usage:.0%} full throughout the last 5 minutes."
        yield _trouble("KV cache full", "KvCacheFull", text)


def _replays(samples: list[Sample]) -> Iterator[Trouble]:
    lag = max((value for name, _, value in samples if name == "truespec_replay_lag_seconds"), default=0.0)
    if lag > REPLAY_LAG_LIMIT_S:
        text = f"The oldest answer has waited {lag / 60:.0f} minutes for its replay: a fault would be noticed late."
        yield _trouble("replays late", "RefereeBehind", text)


def _plural(count: float, word: str) -> str:
    return f"{count:,.0f} {word}{'' if count == 1 else 's'}"


def _listed(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,.0f} {name}" for name, count in counts.items())
