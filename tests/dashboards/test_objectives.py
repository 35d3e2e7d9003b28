"""The example of docs/operations.md of an objective: its alerts fire when the budget burns, and only then."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.telemetry.metric_names import METRICS
from tests.support.prometheus import Suite, promtool, run_suites

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
COMMON = 'job="j",model_name="m",namespace="n"'
FAST, SLOW = "TruespecBudgetBurnsFast", "TruespecBudgetBurns"


@pytest.fixture(scope="module")
def text() -> str:
    (block,) = re.findall(r"^```yaml\n(groups:\n.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    return str(block)


def traffic(*parts: tuple[int, float, float]) -> list[dict[str, str]]:
    """100 requests a minute: for so many minutes, these shares of them late and failed."""
    series: dict[str, list[str]] = {"in time": [], "ended": [], "failed": []}
    at = dict.fromkeys(series, 0.0)
    for minutes, late, failed in parts:
        rates = {"in time": 100 * (1 - late - failed), "ended": 100 * (1 - failed), "failed": 100 * failed}
        for name, rate in rates.items():
            series[name].append(f"{at[name]:g}+{rate:g}x{minutes - 1}")
            at[name] += rate * minutes
    selectors = {
        "in time": f'truespec_request_duration_seconds_bucket{{{COMMON},pool="decode",le="30.0"}}',
        "ended": f'truespec_requests_total{{{COMMON},pool="decode",outcome="stop"}}',
        "failed": f'truespec_requests_total{{{COMMON},pool="decode",outcome="error"}}',
    }
    return [{"series": selectors[name], "values": " ".join(values)} for name, values in series.items()]


def case(series: list[dict[str, str]], minute: int, **firing: str) -> dict[str, Any]:
    def expected(alert: str) -> list[dict[str, Any]]:
        if alert not in firing:
            return []
        labels = {"job": "j", "model_name": "m", "namespace": "n", "severity": firing[alert]}
        return [{"exp_labels": labels, "exp_annotations": {"summary": "m answers too late, or not at all."}}]

    tests = [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": expected(name)} for name in (FAST, SLOW)]
    return {"interval": "1m", "input_series": series, "alert_rule_test": tests}


def test_the_example_fires_when_the_budget_burns(text: str, tmp_path: Path) -> None:
    healthy, incident = (200, 0.001, 0.0), (60, 0.2, 0.0)
    cases = {
        "healthy": [case(traffic((200, 0.005, 0.0)), 190)],
        "a blip": [case(traffic(healthy, (2, 0.5, 0.0), healthy), 203)],
        "an incident": [case(traffic(healthy, incident), 255, **{FAST: "critical", SLOW: "warning"})],
        "after it": [case(traffic(healthy, incident, (60, 0.0, 0.0)), 270, **{SLOW: "warning"})],
        "a slow loss": [case(traffic((200, 0.0, 0.02)), 190, **{SLOW: "warning"})],
        "failures alone": [case(traffic((30, 0.0, 1.0))[1:], 25, **{FAST: "critical", SLOW: "warning"})],
    }
    groups = yaml.safe_load(text)["groups"]
    run_suites(tmp_path, {name: Suite(groups, tests) for name, tests in cases.items()})


def test_promtool_accepts_the_example_and_its_limit_is_a_bucket(text: str, tmp_path: Path) -> None:
    rules = tmp_path / "objectives.yaml"
    rules.write_text(text, encoding="utf-8")
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", str(rules))
    asked = re.findall(r'(truespec_\w+)_bucket\{le="([\d.]+)"\}', text)
    assert asked and all(float(limit) in METRICS[name].buckets for name, limit in asked)
