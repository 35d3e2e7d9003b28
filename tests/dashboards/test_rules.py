"""Prometheus' own checker on the rules, on every alert, and on what we export."""

import re
from pathlib import Path

import pytest
import yaml

from dashboards.alerts import Alert
from dashboards.build import ALERTS, PAGES, rule_file, write
from dashboards.panels import ANNOTATIONS
from dashboards.queries import QueryScope
from serve_app.telemetry.metric_names import CATALOGUE, COMMON_LABELS
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from tests.support.loops import for_each
from tests.support.prometheus import Suite, part_of, promtool, run_suites
from tests.support.rule_cases import CASES, Case, in_two_namespaces

pytestmark = pytest.mark.slow


def of_alert(alert: str, *cases: Case) -> Suite:
    return Suite(part_of(rule_file()["groups"], alert), [case.as_dict() for case in cases])


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    rules = [str(tmp_path / name) for name in write(tmp_path) if name.startswith("rules/")]
    assert promtool("check", "rules", "--lint-fatal", *rules).count("SUCCESS") == len(rules) == 2


def test_promtool_can_read_every_query_of_the_pages(tmp_path: Path) -> None:
    exprs = [query.expr for page in PAGES for panel in page.panels for query in panel.queries]
    exprs += [annotation["target"]["expr"] for annotation in ANNOTATIONS]
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


EVENTS = [  # a counter's values, minutes, and its events in the hour before each
    ("_x70 1x80", (65, 110, 135), (None, 1, 0)),  # a label's value that was never seen
    ("_x70 2x10 3x60", (75, 110), (2, 3)),
    ("0x70 1x60", (65, 110), (0, 1)),  # one that was counted as 0
    ("7x70 0x3 1x60", (110,), (1,)),  # a restart
    ("7x200", (110,), (0,)),
    ("7x40 _x40 7x60", (110,), (0,)),  # a gap in scraping
    ("_x200", (110,), (None,)),
]


def test_a_counters_events_include_the_first_of_a_series(tmp_path: Path) -> None:
    expr = QueryScope('namespace="ill"', "1h").events("selfcheck_alarms_total")
    name = 'truespec_selfcheck_alarms_total{{namespace="{}",check="x"}}'
    suites = {}
    for values, minutes, events in EVENTS:
        samples = [[] if number is None else [{"labels": "{}", "value": number}] for number in events]
        seen = [
            {"expr": f"round({expr})", "eval_time": f"{minute}m", "exp_samples": expected}
            for minute, expected in zip(minutes, samples, strict=True)
        ]
        series = [{"series": name.format("ill"), "values": values}]
        series.append({"series": name.format("other"), "values": "_x75 5x60"})
        suites[values] = Suite([], [{"interval": "1m", "input_series": series, "promql_expr_test": seen}])
    run_suites(tmp_path, suites)


def test_promtool_has_nothing_to_say_about_the_exposition() -> None:
    sink = PrometheusSink(source="r1")
    metrics = Metrics(sink, model_name="tiny", pool="decode")
    record = {"counter": metrics.count, "gauge": metrics.gauge, "histogram": metrics.observe}
    for metric in CATALOGUE:
        own = [label for label in metric.label_names if label not in COMMON_LABELS]
        record[metric.kind](metric.name, 1.0, **dict.fromkeys(own, "x"))
    assert promtool("check", "metrics", text=sink.exposition()[0].decode()) == ""
