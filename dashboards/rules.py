"""The files of Prometheus' rules: recordings and alerts, and our series under vLLM's names."""

from typing import Any

from dashboards.alerts import ALERTS
from dashboards.queries import QueryScope
from dashboards.recordings import RECORDINGS

_ALL = QueryScope("", "5m")
_INTERVAL = "30s"
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")

# Metrics of OpenTelemetry's conventions for servers of models, and the histograms of ours that are the same.
GEN_AI_NAMES = {
    "gen_ai.server.request.duration": "request_duration_seconds",
    "gen_ai.server.time_to_first_token": "time_to_first_token_seconds",
    "gen_ai.server.time_per_output_token": "time_per_output_token_seconds",
}

# vLLM's names, for public dashboards that expect them; truespec itself never exports these.
VLLM_NAMES = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
    "vllm:num_preemptions_total": "preemptions_total",
    "vllm:generation_tokens_total": "emitted_tokens_total",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total": "prefix_cache_queries_total",  # production-stack asks by older names
    "vllm:gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
    "vllm:e2e_request_latency_seconds": "request_duration_seconds",
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "inter_token_latency_seconds",  # its name until 2025
    "vllm:request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "vllm:request_queue_time_seconds": "queue_time_seconds",
    "vllm:request_prefill_time_seconds": "prefill_time_seconds",
    "vllm:request_decode_time_seconds": "decode_time_seconds",
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:request_generation_tokens": "request_answer_tokens",
    "vllm:spec_decode_num_drafts_total": "drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "accepted_tokens_per_position_total",
}
_COMPUTED = _ALL.series("prompt_tokens_total")
VLLM_EXPRESSIONS = {  # that are not one of ours by another name
    "vllm:prompt_tokens_total": f"{_COMPUTED} + ({_ALL.series('prefix_cache_hits_total')} or 0 * {_COMPUTED})",
    "vllm:request_success_total": (
        f"label_replace({_ALL.series('requests_total')}, 'finished_reason', '$1', 'outcome', '(.+)')"
    ),
}


def rule_file() -> dict[str, Any]:
    """Recording rules first, so that the alerts after them use values of the same evaluation."""
    return {
        "groups": [
            {"name": "truespec-recording", "interval": _INTERVAL, "rules": [rule.as_dict() for rule in RECORDINGS]},
            {"name": "truespec-alerts", "interval": _INTERVAL, "rules": [alert.as_dict() for alert in ALERTS]},
        ]
    }


def chart_rules() -> dict[str, Any]:
    """The same as the chart reads them: alerts with their defaults beside them, where a value may take their place."""
    recording, alerts = rule_file()["groups"]
    return {"groups": [recording, alerts | {"rules": [alert.for_chart() for alert in ALERTS]}]}


def vllm_rule_file() -> dict[str, Any]:
    """Optional rules that also record our series under vLLM's names."""
    expressions = dict(VLLM_EXPRESSIONS)
    for name, ours in VLLM_NAMES.items():
        series = _ALL.series(ours)
        parts = _HISTOGRAM_PARTS if series.endswith("_bucket") else ("",)
        expressions |= {f"{name}{part}": series.removesuffix("_bucket") + part for part in parts}
    rules = [{"record": name, "expr": expr} for name, expr in expressions.items()]
    return {"groups": [{"name": "truespec-vllm-names", "interval": _INTERVAL, "rules": rules}]}
