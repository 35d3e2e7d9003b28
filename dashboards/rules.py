"""The files of Prometheus' rules: recordings and alerts, and our series under vLLM's names."""

from typing import Any

from dashboards.alerts import ALERTS
from dashboards.queries import QueryScope
from dashboards.recordings import RECORDINGS

_ALL = QueryScope("", "5m")
_INTERVAL = "30s"

# Metrics of OpenTelemetry's conventions for servers of models, and the histograms of ours that are the same.
GEN_AI_NAMES = {
    "gen_ai.server.request.duration": "request_duration_seconds",
    "gen_ai.server.time_to_first_token": "time_to_first_token_seconds",
}

# vLLM's names of what gateways and autoscalers choose a server by; truespec itself never exports these.
VLLM_NAMES = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
}


def rule_file() -> dict[str, Any]:
    """Recording rules first, so that the alerts after them use values of the same evaluation."""
    recorded = [{"record": name, "expr": expr} for name, expr in RECORDINGS.items()]
    return {
        "groups": [
            {"name": "truespec-recording", "interval": _INTERVAL, "rules": recorded},
            {"name": "truespec-alerts", "interval": _INTERVAL, "rules": [alert.as_dict() for alert in ALERTS]},
        ]
    }


def chart_rules() -> dict[str, Any]:
    """The same as the chart reads them: alerts with their defaults beside them, where a value may take their place."""
    recording, alerts = rule_file()["groups"]
    return {"groups": [recording, alerts | {"rules": [alert.for_chart() for alert in ALERTS]}]}


def vllm_rule_file() -> dict[str, Any]:
    """Optional rules that also record our series under vLLM's names."""
    rules = [{"record": name, "expr": _ALL.series(ours)} for name, ours in VLLM_NAMES.items()]
    return {"groups": [{"name": "truespec-vllm-names", "interval": _INTERVAL, "rules": rules}]}
