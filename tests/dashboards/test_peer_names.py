"""Names that others give to what we export."""

import re
from pathlib import Path

import yaml

from dashboards.rules import GEN_AI_NAMES, vllm_rule_file
from serve_app.telemetry.metric_names import METRICS

ROOT = Path(__file__).parents[2]
# What the endpoint picker of the Gateway API's inference extension, and production-stack's autoscaler, ask of a server.
ASKED = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}


def test_what_a_gateway_asks_for_is_recorded_under_vllms_names() -> None:
    rules = {rule["record"]: rule["expr"] for group in vllm_rule_file()["groups"] for rule in group["rules"]}
    assert rules.keys() == ASKED
    assert all(METRICS[expr].kind == "gauge" for expr in rules.values())


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
