"""Prometheus' own checker on the rules, on every alert, and on what we export."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import ALERTS, Alert
from dashboards.build import PAGES
from dashboards.panels import ANNOTATIONS, Panel
from dashboards.sanity import ALARMS, VIOLATIONS
from serve_app.telemetry.metric_names import CATALOGUE, COMMON_LABELS
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from tests.support.prometheus import promtool
from tests.support.rule_cases import CASES, in_two_namespaces

RULES = Path(__file__).parents[2] / "dashboards" / "generated" / "rules"


@cache
def groups() -> list[dict[str, Any]]:
    return list(yaml.safe_load((RULES / "truespec.yaml").read_text(encoding="utf-8"))["groups"])


def needed(exprs: Iterable[str]) -> set[str]:
    """The recordings that expressions read, and those that these read."""
    recorded = {rule["record"]: rule["expr"] for group in groups() for rule in group["rules"] if "record" in rule}
    found: set[str] = set()
    waiting = list(exprs)
    while waiting:
        words = set(re.findall(r"[a-zA-Z_:][\w:]*", waiting.pop()))
        new = words & recorded.keys() - found
        found |= new
        waiting += [recorded[name] for name in new]
    return found


def promtool_test(folder: Path, tests: list[Any], alert: str = "") -> None:
    """Run promtool's unit tests with our rules; fails where one of them does.

    promtool evaluates every rule each minute of every test, so it gets those of the alert alone, or of the expressions.
    """
    ours = [rule["expr"] for group in groups() for rule in group["rules"] if rule.get("alert") == alert]
    names = needed(ours or [one["expr"] for test in tests for one in test["promql_expr_test"]])
    kept = []
    for group in groups():
        own = [rule for rule in group["rules"] if rule.get("record") in names or rule.get("alert") == alert]
        kept += [{**group, "rules": own}] if own else []
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": kept}, sort_keys=False), encoding="utf-8")
    file = {"rule_files": [str(folder / "rules.yaml")], "evaluation_interval": "1m", "tests": tests}
    (folder / "cases.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    promtool("test", "rules", str(folder / "cases.yaml"))


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yaml")), ids=lambda path: path.stem)
def test_promtool_accepts_the_rules(path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", str(path))


def test_promtool_can_read_every_query_of_the_pages(tmp_path: Path) -> None:
    exprs = [query.expr for page in PAGES for panel in page.panels for query in panel.queries]
    exprs += [annotation.expr for annotation in ANNOTATIONS]
    filled = [re.sub(r"\$__\w+", "5m", expr) for expr in exprs]
    rules = [{"record": f"panel:query:{number}", "expr": expr} for number, expr in enumerate(filled)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(exprs)} rules found" in promtool("check", "rules", str(tmp_path / "panels.yaml"))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_when_it_should_and_only_then(alert: Alert, tmp_path: Path) -> None:
    cases = [case for case in CASES if case.alert == alert.name]
    assert any(case.fires for case in cases) and not all(case.fires for case in cases)
    promtool_test(tmp_path, [case.as_dict() for case in cases], alert.name)


@pytest.mark.parametrize(
    "alert", [alert for alert in ALERTS if alert.name != "TruespecMetricsMissing"], ids=lambda a: a.name
)
def test_an_alert_is_on_the_release_that_is_ill_and_names_its_namespace(alert: Alert, tmp_path: Path) -> None:
    promtool_test(tmp_path, [in_two_namespaces(alert.name).as_dict()], alert.name)


@pytest.mark.parametrize("panel", [ALARMS, VIOLATIONS], ids=lambda panel: panel.title)
@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ("_x70 1x60", 1),  # as Ray's agent exports it
        ("_x70 2x10 3x60", 3),
        ("0x70 1x60", 1),  # as the application does
        ("7x70 0x3 1x60", 1),  # a restart
        ("7x200", 0),
        ("7x40 _x40 7x60", 0),  # a gap in scraping
        ("_x200", None),
    ],
)
def test_a_figure_counts_the_first_event_of_a_series(
    panel: Panel, values: str, shown: int | None, tmp_path: Path
) -> None:
    names = {
        "selfcheck_alarms_total": "check",
        "selfcheck_violations_total": "kind",
        "logprob_violations_total": "kind",
    }
    tests = []
    for query in panel.queries:
        (name,) = set(re.findall(r"truespec_(\w+)", query.expr))
        labels = f'namespace="ill",job="j",model_name="m",pool="decode",{names.get(name, "alarm")}="x"'
        beside = labels.replace("ill", "other")
        expr = query.expr
        for key, value in {"$namespace": "ill", "$job": "j", "$model": ".*", "$pool": ".*", "$__range": "1h"}.items():
            expr = expr.replace(key, value)
        expected = [] if shown is None else [{"labels": "{}", "value": shown}]
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": f"truespec_{name}{{{labels}}}", "values": values},
                    {"series": f"truespec_{name}{{{beside}}}", "values": "_x75 5x60"},
                ],
                "promql_expr_test": [{"expr": f"round({expr})", "eval_time": "110m", "exp_samples": expected}],
            }
        )
    promtool_test(tmp_path, tests)


def test_an_annotation_marks_an_event_once_and_nothing_else(tmp_path: Path) -> None:
    series = {
        "Breaker trips": 'breaker_trips_total{%s,reason="drift"}',
        "Weight updates": 'weight_updates_total{%s,result="ok"}',
        "Replicas replaced": "replica_restarts_total{%s}",
    }
    assert series.keys() == {annotation.name for annotation in ANNOTATIONS}
    for annotation in ANNOTATIONS:
        expr = annotation.expr.replace("$namespace", "n").replace("$job", "j")
        expr = expr.replace("$model", ".*").replace("$pool", ".*")
        for values, marked in (("_x70 1x30", range(70, 73)), ("0x70 1x30", range(71, 73)), ("7x100", ())):
            name = series[annotation.name] % 'namespace="n",job="j",model_name="m",pool="decode"'
            seen = [
                {
                    "expr": f"count({expr})",
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if minute in marked else [],
                }
                for minute in (65, 71, 75, 90)
            ]
            test = {"interval": "1m", "input_series": [{"series": f"truespec_{name}", "values": values}]}
            promtool_test(tmp_path, tests=[test | {"promql_expr_test": seen}])


def test_a_case_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.alert == "TruespecBreakerOpen").as_dict()
    case["alert_rule_test"][0]["exp_alerts"] = []
    with pytest.raises(AssertionError, match="FAILED"):
        promtool_test(tmp_path, [case], "TruespecBreakerOpen")


def test_promtool_has_nothing_to_say_about_the_exposition() -> None:
    sink = PrometheusSink(source="r1")
    metrics = Metrics([sink], model_name="tiny", pool="decode")
    record = {"counter": metrics.count, "gauge": metrics.gauge, "histogram": metrics.observe}
    for metric in CATALOGUE:
        own = [label for label in metric.label_names if label not in COMMON_LABELS]
        record[metric.kind](metric.name, 1.0, **dict.fromkeys(own, "x"))
    assert promtool("check", "metrics", text=sink.exposition()[0].decode()) == ""
