"""Series that public dashboards of vLLM ask for, and whether the optional rules record them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.rules import GEN_AI_NAMES, VLLM_EXPRESSIONS, VLLM_NAMES, vllm_rule_file
from serve_app.telemetry.metric_names import METRICS
from tests.support.prometheus import Suite, run_suites

ROOT = Path(__file__).parents[2]
LABELS = 'job="j",model_name="m",pool="decode"'

# Of vllm-project/vllm, examples/observability, and vllm-project/production-stack, helm/dashboards (November 2026).
ASKED = re.findall(
    r"\w+",
    """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count e2e_request_latency_seconds_sum
generation_tokens_total gpu_prefix_cache_hits_total gpu_prefix_cache_queries_total inter_token_latency_seconds_bucket
inter_token_latency_seconds_count inter_token_latency_seconds_sum kv_cache_usage_perc num_requests_running
num_requests_waiting prompt_tokens_total request_decode_time_seconds_sum request_generation_tokens_bucket
request_prefill_time_seconds_sum request_prompt_tokens_bucket request_queue_time_seconds_sum request_success_total
request_time_per_output_token_seconds_bucket request_time_per_output_token_seconds_count
request_time_per_output_token_seconds_sum spec_decode_num_accepted_tokens_per_pos_total
spec_decode_num_accepted_tokens_total spec_decode_num_draft_tokens_total spec_decode_num_drafts_total
time_to_first_token_seconds_bucket time_to_first_token_seconds_count time_to_first_token_seconds_sum
""",
)


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    return list(vllm_rule_file()["groups"])


def test_what_vllms_dashboards_ask_for_is_recorded(groups: list[dict[str, Any]]) -> None:
    recorded = {rule["record"] for group in groups for rule in group["rules"]}
    assert {f"vllm:{name}" for name in ASKED} - recorded == set()


def histogram(name: str, counts: dict[str, int], total: float) -> dict[str, float]:
    """Series with what they gain each minute."""
    buckets = {f'truespec_{name}_bucket{{{LABELS},le="{bound}"}}': float(count) for bound, count in counts.items()}
    ends = {"count": max(counts.values()), "sum": total}
    return buckets | {f"truespec_{name}_{part}{{{LABELS}}}": float(value) for part, value in ends.items()}


def test_their_queries_give_our_figures(groups: list[dict[str, Any]], tmp_path: Path) -> None:
    """Queries as those dashboards have them, where more is done than to show a series."""
    gains = {
        **histogram("request_duration_seconds", {"5.0": 30, "10.0": 60, "+Inf": 60}, 300.0),
        **histogram("time_per_output_token_seconds", {"0.025": 60, "0.05": 60, "+Inf": 60}, 1.2),
        **histogram("request_prompt_tokens", {"16.0": 12, "32.0": 60, "+Inf": 60}, 1200.0),
        f'truespec_requests_total{{{LABELS},outcome="stop"}}': 45.0,
        f'truespec_requests_total{{{LABELS},outcome="length"}}': 15.0,
        f"truespec_prompt_tokens_total{{{LABELS.replace('decode', 'prefill')}}}": 900.0,
        f"truespec_prefix_cache_hits_total{{{LABELS.replace('decode', 'prefill')}}}": 300.0,
        f"truespec_prompt_tokens_total{{{LABELS}}}": 0.0,  # which has no hits, as Ray's agent exports it
    }
    of = '{model_name="m"}[5m]'
    expected = {
        f"histogram_quantile(0.5, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{of})))": [("{}", 5)],
        f"sum(rate(vllm:e2e_request_latency_seconds_sum{of}) / rate(vllm:e2e_request_latency_seconds_count{of}))": [
            ("{}", 5)
        ],
        f"sum(rate(vllm:request_time_per_output_token_seconds_sum{of})) * 60": [("{}", 1.2)],
        f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{of}))": [
            ('{le="16.0"}', 60),
            ('{le="32.0"}', 300),
            ('{le="+Inf"}', 300),
        ],
        f"sum by(finished_reason) (increase(vllm:request_success_total{of}))": [
            ('{finished_reason="stop"}', 225),
            ('{finished_reason="length"}', 75),
        ],
        f"sum(increase(vllm:prompt_tokens_total{of}))": [("{}", 6000)],
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": f"0+{gain:g}x30"} for series, gain in gains.items()],
        "promql_expr_test": [
            {
                "expr": f"round({expr}, 0.001)",
                "eval_time": "20m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for expr, samples in expected.items()
        ],
    }
    run_suites(tmp_path, {"vllm": Suite(groups, [test])})


def test_a_histogram_is_recorded_with_all_its_parts(groups: list[dict[str, Any]]) -> None:
    recorded = {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}
    for name, ours in VLLM_NAMES.items():
        metric = METRICS[f"truespec_{ours}"]
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        assert {recorded[f"{name}{part}"] for part in parts} == {f"{metric.name}{part}" for part in parts}
    assert all(re.findall(r"\btruespec_\w+", expr) for expr in VLLM_EXPRESSIONS.values())


def test_the_collectors_example_renames_histograms_that_are_there() -> None:
    text = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(receivers:\n.*?)^```", text, re.S | re.M)
    transforms = yaml.safe_load(block)["processors"]["metricstransform"]["transforms"]
    assert {one["new_name"]: one["include"].removeprefix("truespec_") for one in transforms} == GEN_AI_NAMES
    for one in transforms:
        assert METRICS[one["include"]].kind == "histogram"
        assert {step.get("new_label") for step in one["operations"]} == {
            "gen_ai.request.model",
            "gen_ai.provider.name",
            "gen_ai.operation.name",
        }
