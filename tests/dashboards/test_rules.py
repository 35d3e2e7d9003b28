"""Prometheus' own checker on the rules, on every alert, and on what we export."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import Alert
from dashboards.build import ALERTS, PAGES, rule_file, write
from dashboards.panels import ANNOTATIONS
from dashboards.sanity import ALARMS, VIOLATIONS
from serve_app.telemetry.metric_names import CATALOGUE, COMMON_LABELS
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from tests.support.loops import for_each
from tests.support.prometheus import Suite, part_of, promtool, run_suites
from tests.support.rule_cases import CASES, Case, in_two_namespaces

pytestmark = pytest.mark.slow


@cache
def groups() -> list[dict[str, Any]]:
    return list(rule_file()["groups"])


def of_alert(alert: str, *cases: Case) -> Suite:
    return Suite(part_of(groups(), alert), [case.as_dict() for case in cases])


def of_expressions(tests: list[dict[str, Any]]) -> Suite:
    return Suite(part_of(groups(), exprs=[one["expr"] for test in tests for one in test["promql_expr_test"]]), tests)


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    rules = [str(tmp_path / name) for name in write(tmp_path) if name.startswith("rules/")]
    assert promtool("check", "rules", "--lint-fatal", *rules).count("SUCCESS") == len(rules) == 2


def test_promtool_can_read_every_query_of_the_pages(tmp_path: Path) -> None:
    exprs = [query.expr for page in PAGES for panel in page.panels for query in panel.queries]
    exprs += [annotation.expr for annotation in ANNOTATIONS]
    filled = [re.sub(r"\$__\w+", "5m", expr) for expr in exprs]
    rules = [{"record": f"panel:query:{number}", "expr": expr} for number, expr in enumerate(filled)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(exprs)} rules found" in promtool("check", "rules", str(tmp_path / "panels.yaml"))


@for_each(ALERTS, lambda alert: alert.name)
def test_an_alert_has_cases_where_it_fires_and_where_it_does_not(alert: Alert) -> None:
    fires = [case.fires is not None for case in CASES if case.alert == alert.name]
    assert any(fires) and not all(fires)


def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    cases = {alert.name: [case for case in CASES if case.alert == alert.name] for alert in ALERTS}
    run_suites(tmp_path, {alert: of_alert(alert, *its_cases) for alert, its_cases in cases.items()})


def test_an_alert_is_on_the_release_that_is_ill_and_names_its_namespace(tmp_path: Path) -> None:
    names = [alert.name for alert in ALERTS if alert.name != "TruespecMetricsMissing"]
    run_suites(tmp_path, {name: of_alert(name, in_two_namespaces(name)) for name in names})


EVENTS: list[tuple[str, int | None]] = [
    ("_x70 1x60", 1),  # a label's value that was never seen
    ("_x70 2x10 3x60", 3),
    ("0x70 1x60", 1),  # one that was counted as 0
    ("7x70 0x3 1x60", 1),  # a restart
    ("7x200", 0),
    ("7x40 _x40 7x60", 0),  # a gap in scraping
    ("_x200", None),
]


def test_a_figure_counts_the_first_event_of_a_series(tmp_path: Path) -> None:
    suites = {
        f"{panel.title}, {values}": of_expressions([figure_test(query.expr, values, shown) for query in panel.queries])
        for panel in (ALARMS, VIOLATIONS)
        for values, shown in EVENTS
    }
    run_suites(tmp_path, suites)


def figure_test(expr: str, values: str, shown: int | None) -> dict[str, Any]:
    """A query over an hour, for a series with these values beside one of another namespace."""
    names = {
        "selfcheck_alarms_total": "check",
        "selfcheck_violations_total": "kind",
        "logprob_violations_total": "kind",
    }
    (name,) = set(re.findall(r"truespec_(\w+)", expr))
    labels = f'namespace="ill",job="j",model_name="m",pool="decode",{names.get(name, "alarm")}="x"'
    beside = labels.replace("ill", "other")
    for key, value in {"$namespace": "ill", "$job": "j", "$model": ".*", "$pool": ".*", "$__range": "1h"}.items():
        expr = expr.replace(key, value)
    expected = [] if shown is None else [{"labels": "{}", "value": shown}]
    return {
        "interval": "1m",
        "input_series": [
            {"series": f"truespec_{name}{{{labels}}}", "values": values},
            {"series": f"truespec_{name}{{{beside}}}", "values": "_x75 5x60"},
        ],
        "promql_expr_test": [{"expr": f"round({expr})", "eval_time": "110m", "exp_samples": expected}],
    }


def test_an_annotation_marks_an_event_once_and_nothing_else(tmp_path: Path) -> None:
    series = {
        "Breaker trips": 'breaker_trips_total{%s,reason="drift"}',
        "Weight updates": 'weight_updates_total{%s,result="ok"}',
        "Replicas replaced": "replica_restarts_total{%s}",
    }
    assert series.keys() == {annotation.name for annotation in ANNOTATIONS}
    suites = {}
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
            suites[f"{annotation.name}, {values}"] = of_expressions([test | {"promql_expr_test": seen}])
    run_suites(tmp_path, suites)


def test_promtool_has_nothing_to_say_about_the_exposition() -> None:
    sink = PrometheusSink(source="r1")
    metrics = Metrics(sink, model_name="tiny", pool="decode")
    record = {"counter": metrics.count, "gauge": metrics.gauge, "histogram": metrics.observe}
    for metric in CATALOGUE:
        own = [label for label in metric.label_names if label not in COMMON_LABELS]
        record[metric.kind](metric.name, 1.0, **dict.fromkeys(own, "x"))
    assert promtool("check", "metrics", text=sink.exposition()[0].decode()) == ""
