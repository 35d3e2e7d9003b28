"""Prometheus' own checker on the rules and on every alert."""

import re
from pathlib import Path

import pytest
import yaml

from dashboards.build import ALERTS, PAGES, rule_file, write
from dashboards.panels import ANNOTATIONS
from dashboards.queries import QueryScope
from tests.support.prometheus import Suite, part_of, promtool, run_suites
from tests.support.rule_cases import CASES, Case, in_two_namespaces
from tests.support.rule_histories import HISTORIES, history

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


def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    cases = {alert.name: [case for case in CASES if case.alert == alert.name] for alert in ALERTS}
    assert all({case.fires is None for case in own} == {True, False} for own in cases.values())
    run_suites(tmp_path, {alert: of_alert(alert, *its_cases) for alert, its_cases in cases.items()})


def test_no_alert_takes_what_prometheus_missed_for_what_happened(tmp_path: Path) -> None:
    run_suites(tmp_path, {"histories": Suite(rule_file()["groups"], [history(what) for what in HISTORIES])})


def test_an_alert_is_on_the_release_that_is_ill_and_names_its_namespace(tmp_path: Path) -> None:
    names = [alert.name for alert in ALERTS if alert.name != "TruespecMetricsMissing"]
    run_suites(tmp_path, {name: of_alert(name, in_two_namespaces(name)) for name in names})


EVENTS = [  # a counter's values, when its release was scraped, minutes, and its events in the hour before each
    ("_x70 1x80", "1x200", (65, 110, 135), (None, 1, 0)),  # a label's value that was never seen
    ("_x70 2x10 3x60", "1x200", (75, 110), (2, 3)),
    ("0x70 1x60", "1x200", (65, 110), (0, 1)),  # one that was counted as 0
    ("7x70 0x3 1x60", "1x200", (110,), (1,)),  # a restart
    ("7x20 stale _x70 1x60", "1x200", (100,), (1,)),  # one that forgot the series
    ("7x40 _x80 7x60", "1x40 _x80 1x60", (123, 150), (0, 0)),  # a gap in scraping
    ("_x200", "1x200", (110,), (None,)),
]


def test_a_counters_events_include_the_first_of_a_series(tmp_path: Path) -> None:
    expr = QueryScope('namespace="ill"', "1h").events("selfcheck_alarms_total")
    name = 'truespec_selfcheck_alarms_total{{namespace="{}",check="x"}}'
    suites = {}
    for values, scraped, minutes, events in EVENTS:
        samples = [[] if number is None else [{"labels": "{}", "value": number}] for number in events]
        seen = [
            {"expr": f"round({expr})", "eval_time": f"{minute}m", "exp_samples": expected}
            for minute, expected in zip(minutes, samples, strict=True)
        ]
        series = [{"series": name.format("ill"), "values": values}]
        series.append({"series": name.format("other"), "values": "_x75 5x60"})
        series.append({"series": 'truespec_replicas_wanted{namespace="ill"}', "values": scraped})
        suites[values] = Suite([], [{"interval": "1m", "input_series": series, "promql_expr_test": seen}])
    run_suites(tmp_path, suites)
