"""Prometheus' own checker on the rules, on every alert, and on what we export."""

import re
from pathlib import Path

import pytest
import yaml

from dashboards.build import PAGES
from dashboards.rules import ALERTS, Alert
from serve_app.metric_names import CATALOGUE, COMMON_LABELS
from serve_app.metrics import Metrics, PrometheusSink
from tests.dashboards.prometheus import promtool
from tests.dashboards.rule_cases import CASES

RULES = Path(__file__).parents[2] / "dashboards" / "generated" / "rules"


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yaml")), ids=lambda path: path.stem)
def test_promtool_accepts_the_rules(path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", str(path))


def test_promtool_can_read_every_query_of_the_panels(tmp_path: Path) -> None:
    exprs = [query.expr for page in PAGES for panel in page.panels for query in panel.queries]
    filled = [re.sub(r"\$__\w+", "5m", expr) for expr in exprs]
    rules = [{"record": f"panel:query:{number}", "expr": expr} for number, expr in enumerate(filled)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(exprs)} rules found" in promtool("check", "rules", str(tmp_path / "panels.yaml"))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_when_it_should_and_only_then(alert: Alert, tmp_path: Path) -> None:
    cases = [case for case in CASES if case.alert == alert.name]
    assert any(case.fires for case in cases) and not all(case.fires for case in cases)
    file = {
        "rule_files": [str(RULES / "truespec.yaml")],
        "evaluation_interval": "1m",
        "tests": [case.as_dict() for case in cases],
    }
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    promtool("test", "rules", str(tmp_path / "cases.yaml"))


def test_a_case_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.alert == "TruespecBreakerOpen").as_dict()
    case["alert_rule_test"][0]["exp_alerts"] = []
    file = {"rule_files": [str(RULES / "truespec.yaml")], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", str(tmp_path / "cases.yaml"))


def test_promtool_has_nothing_to_say_about_the_exposition() -> None:
    sink = PrometheusSink(source="r1")
    metrics = Metrics([sink], model_name="tiny", pool="decode")
    record = {"counter": metrics.count, "gauge": metrics.gauge, "histogram": metrics.observe}
    for metric in CATALOGUE:
        own = [label for label in metric.label_names if label not in COMMON_LABELS]
        record[metric.kind](metric.name, 1.0, **dict.fromkeys(own, "x"))
    assert promtool("check", "metrics", text=sink.exposition()[0].decode()) == ""
