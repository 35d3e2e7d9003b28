"""Names that others give to what we export."""

from pathlib import Path

from dashboards.build import GEN_AI_NAMES, vllm_rule_file
from serve_app.telemetry.metric_names import METRICS

ROOT = Path(__file__).parents[2]
# What the endpoint picker of the Gateway API's inference extension, and production-stack's autoscaler, ask of a server.
ASKED = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}


def test_what_a_gateway_asks_for_is_recorded_under_vllms_names() -> None:
    rules = {rule["record"]: rule["expr"] for group in vllm_rule_file()["groups"] for rule in group["rules"]}
    assert rules.keys() == ASKED
    assert all(METRICS[expr].kind == "gauge" for expr in rules.values())


def test_the_names_of_opentelemetry_are_of_histograms_and_on_the_page_of_traces() -> None:
    text = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
    for name, ours in GEN_AI_NAMES.items():
        assert METRICS[f"truespec_{ours}"].kind == "histogram"
        assert f"`truespec_{ours}` to `{name}`" in " ".join(text.split())
