"""Histories in which nothing happens that an alert is about, of every series that a rule reads.

All counters have counts of last week, with every value of every label; those of `_TRAFFIC` rise, too.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dashboards.build import rule_file
from serve_app.telemetry.metric_names import COMMON_MEANINGS, METRICS

_OPEN = {"code": ("200", "429", "500", "503"), "drafter": ("eagle3",)}  # labels whose values the catalogue leaves open
_RAYS = {  # Ray's own, on two nodes, and their values
    'ray_serve_application_status{job="truespec",instance="a"}': 6,
    'ray_serve_haproxy_process_count{job="truespec",instance="a"}': 1,
    'ray_serve_haproxy_process_count{job="truespec",instance="b"}': 1,
    'ray_serve_num_http_requests_total{job="truespec",instance="a",status_code="200"}': 7,
    'ray_serve_num_http_requests_total{job="truespec",instance="b",status_code="502"}': 7,
}
_GAUGES = {"replicas_wanted": 2, "replicas_running": 2, "build_info": 1, "kernels_active": 1, "speculation_enabled": 1}
_TRAFFIC = {"requests_total": "stop", "http_responses_total": "200", "handoffs_total": "ok", "replays_total": "ok",
    "replays_requested_total": "agrees", "watched_requests_total": "captured", "watched_answers_total": "read",
    "draft_tokens_total": "", "accepted_tokens_total": "", "requests_interrupted_total": ""}  # fmt: skip

HISTORIES: dict[str, tuple[int, dict[str, list[int]]]] = {
    "Prometheus is new": (20, {}),
    "Prometheus was away": (111, {"": [20, -75, 16]}),
    "a scrape failed of the application, then of Ray's agents": (30, {"truespec": [16, -1, 13], "ray": [22, -1, 7]}),
    "one of two nodes was gone for a while": (48, {'instance="b"': [16, -20, 12]}),
    "HAProxy was switched off": (32, {"haproxy": [16, -16]}),
    "the service was started again": (36, {"truespec": [16, -3, 17]}),
}
"""Minutes that each takes; for series whose selector has a text, minutes in which they are scraped, and (< 0) not."""


def _series() -> Iterator[tuple[str, float, float]]:
    """Selector, value, and increase a minute of every series that a rule reads."""
    yield from ((selector, value, 0) for selector, value in _RAYS.items())
    text = " ".join(rule["expr"] for group in rule_file()["groups"] for rule in group["rules"])
    for name in sorted(set(re.findall(r"(?<![\w:])truespec_\w+(?![\w:(])", text))):
        metric, short = METRICS[name.removesuffix("_bucket")], name.removeprefix("truespec_")
        pools = COMMON_MEANINGS["pool"] if metric.kind == "gauge" else {"decode": ""}  # a router resumes requests
        meanings = {"pool": pools, **metric.meanings} | ({"le": ""} if "_bucket" in name else {})
        named = {label: tuple(meaning) for label, meaning in meanings.items() if isinstance(meaning, Mapping)}
        labels = {label: named.get(label, _OPEN.get(label, ("+Inf",))) for label in meanings}
        for number in range(max(map(len, labels.values()))):
            own = {label: values[number % len(values)] for label, values in labels.items()}
            inside = ",".join(f'{label}="{value}"' for label, value in own.items())
            rises = short in _TRAFFIC and _TRAFFIC[short] in ("", *own.values())
            value = _GAUGES.get(short, 0) if metric.kind == "gauge" else 7
            yield f'{name}{{job="truespec",instance="app",model_name="tiny",{inside}}}', value, 60 * rises


def history(what: str) -> dict[str, Any]:
    """One of the histories, as a test of promtool, in which nothing fires at any time."""
    minutes, changes = HISTORIES[what]
    series = []
    for selector, value, rise in _series():
        spans = next((spans for text, spans in changes.items() if text in selector), [minutes])
        from_0 = "again" in what and "_total" in selector
        parts, minute = list[str](), 0
        for span in spans[:1] if from_0 and not rise else spans:  # it is there again with its first event
            start = 0 if from_0 and minute else value + rise * minute
            parts.append(f"{start}+{rise}x{span - 1}" if span > 0 else "stale" + f" _x{-span - 1}" * (span < -1))
            minute += abs(span)
        series.append({"series": selector, "values": " ".join(parts)})
    since = changes[""][-1] - 1 if "" in changes else minutes  # a Prometheus that is away evaluates nothing
    fired = f'max by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{since}m]))'
    seen = {"expr": fired, "eval_time": f"{minutes}m", "exp_samples": []}
    return {"name": what, "interval": "1m", "input_series": series, "promql_expr_test": [seen]}
