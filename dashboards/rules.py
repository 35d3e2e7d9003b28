"""The files of Prometheus' rules: recordings and alerts, and our counts under vLLM's names."""

from typing import Any

from dashboards.alerts import ALERTS
from dashboards.queries import QueryScope
from dashboards.recordings import RECORDINGS

_ALL = QueryScope("", "5m")
_INTERVAL = "30s"

# vLLM's names, for public dashboards that expect them; truespec itself never exports these.
_VLLM_NAMES = {
    "vllm:spec_decode_num_drafts_total": "drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "accepted_tokens_per_position_total",
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
}


def rule_file() -> dict[str, Any]:
    """Recording rules first, so that the alerts after them use values of the same evaluation."""
    return {
        "groups": [
            {"name": "truespec-recording", "interval": _INTERVAL, "rules": [rule.as_dict() for rule in RECORDINGS]},
            {"name": "truespec-alerts", "interval": _INTERVAL, "rules": [alert.as_dict() for alert in ALERTS]},
        ]
    }


def chart_alerts() -> dict[str, Any]:
    """The alerts as the chart reads them: with their defaults beside them, where a value may take their place."""
    return {"alerts": [alert.for_chart() for alert in ALERTS]}


def vllm_rule_file() -> dict[str, Any]:
    """Optional rules that also record our counters under vLLM's names."""
    rules = [{"record": name, "expr": _ALL.series(ours)} for name, ours in _VLLM_NAMES.items()]
    return {"groups": [{"name": "truespec-vllm-names", "interval": _INTERVAL, "rules": rules}]}
