"""A real Prometheus scrapes the running service under load: every panel and every rule has data, and it is right."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from dashboards.build import ALERTS, PAGES, write
from dashboards.panels import Query
from dashboards.recordings import PREFILL_FAILURES, RECORDINGS
from serve_app.telemetry.metric_summary import MetricSummary
from tests.support.loops import for_each
from tests.support.prometheus import Prometheus, program, promtool, running_prometheus
from tests.support.runbook_shell import commands, run
from tests.support.services import TOKEN, Load, Service, administered, app_args, deployed
from tests.support.waiting import wait_for

# First: Ray's agent exports what every service of its cluster ever counted, and takes seconds for that of many.
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.first, pytest.mark.timeout(1200)]

APP = "watched"
STATUS = "ray_serve_application_status"
QUERIES = [query for page in PAGES for panel in page.panels for query in panel.queries]
DATA_TIMEOUT_S = 300.0  # for the first figures, on a machine that is busy


@dataclass
class Watched:
    """A service under load, and the Prometheus that watches it."""

    prometheus: Prometheus
    load: Load


def body_of_load(number: int) -> dict[str, Any]:
    body = {"max_tokens": 40, "temperature": (0.0, 0.7)[number % 2], "ignore_eos": True, "logprobs": 2}
    return {"prompt": f"{number} " + "one two three " * 6, **body}


def scrape_configs(service: Service) -> list[dict[str, Any]]:
    """As the chart's monitor: the application, and Ray's agent for what the rules read of Ray's own."""
    agent = next(node["MetricsExportPort"] for node in ray.nodes() if node["Alive"])
    front, path = re.fullmatch(r"http://([^/]+)(/.*)?", service.base_url).groups()  # type: ignore[union-attr]
    return [
        {"job_name": "app", "metrics_path": f"{path}/metrics", "static_configs": [{"targets": [front]}]},
        {
            "job_name": "agents",
            "scrape_interval": "10s",  # it may take seconds, and would take as many more where the next ones wait
            "scrape_timeout": "10s",
            "static_configs": [{"targets": [f"127.0.0.1:{agent}"], "labels": {"job": "app"}}],
            "metric_relabel_configs": [
                {"source_labels": ["__name__", "application"], "regex": f"{STATUS};{APP}", "action": "keep"},
                {"regex": "otel_scope_.*|SessionName|Version|Component", "action": "labeldrop"},
            ],
        },
    ]


@pytest.fixture(scope="module")
def watched(ray_port: int, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    program("prometheus")
    args = app_args(tiny_folder, "disaggregated", admin=administered(tmp_path_factory.mktemp("admin")))
    with deployed(ray_port, APP, args) as service:
        scrape = scrape_configs(service)
        folder = tmp_path_factory.mktemp("prometheus")
        rules = [folder / name for name in write(folder) if name.startswith("rules/")]
        with running_prometheus(folder, scrape, rules) as prometheus, Load(service, body_of_load, clients=3) as load:
            yield Watched(prometheus, load)


def filled(expr: str) -> str:
    """The expression as Grafana sends it."""
    for name, value in {
        "$namespace": ".*",
        "$job": "app",
        "$model": ".*",
        "$pool": ".*",
        "$replica": ".*",
        "$__rate_interval": "5m",
        "$__range": "5m",
    }.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


def has_figures(prometheus: Prometheus, query: Query) -> bool:
    values = [value for _, value in prometheus.values(filled(query.expr))]
    return bool(values) and all(math.isfinite(value) for value in values)


@for_each(QUERIES, lambda query: f"{query.legend}: {query.expr}")
def test_every_panel_has_figures(query: Query, watched: Watched) -> None:
    prometheus = watched.prometheus
    assert not watched.load.errors, "what they were to show will not come"
    if not query.sparse:
        wait_for(lambda: has_figures(prometheus, query), query.expr, DATA_TIMEOUT_S)
    figures = prometheus.values(filled(query.expr))
    assert all(math.isfinite(value) for _, value in figures)
    for label in {*re.findall(r"{{(\w+)}}", query.legend)} - {"namespace"}:  # which a cluster's scraping adds
        assert all(label in labels for labels, _ in figures)


def test_ray_says_that_the_application_runs(watched: Watched) -> None:
    expr = f'{STATUS}{{job="app",application="{APP}"}}'
    wait_for(lambda: [value for _, value in watched.prometheus.values(expr)] == [6.0], expr, DATA_TIMEOUT_S)


def test_every_rule_is_evaluated_and_nothing_is_found_wrong(watched: Watched) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = watched.prometheus.get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_for(lambda: all(rule["health"] != "unknown" for rule in rules()), "evaluation of all rules")
    evaluated = rules()
    assert {rule["name"] for rule in evaluated} >= {*RECORDINGS, *(alert.name for alert in ALERTS)}
    assert not {rule["name"]: rule["lastError"] for rule in evaluated if rule["health"] != "ok"}
    firing = {rule["name"] for rule in evaluated if rule.get("state") == "firing"}
    assert not firing & {alert.name for alert in ALERTS if alert.severity == "critical"}  # it may be slow here
    recorded = {rule["name"]: rule["query"] for rule in evaluated if rule["type"] == "recording"}
    for name in recorded.keys() - {PREFILL_FAILURES}:  # of which there are none here
        wait_for(lambda name=name: bool(watched.prometheus.values(f'{name}{{job="app"}}')), f"figures of {name}")


def test_promtool_has_nothing_to_say_about_what_the_service_exports(watched: Watched) -> None:
    assert promtool("check", "metrics", text=watched.load.service.metrics_text()) == ""


def test_acceptance_by_promql_is_the_engines_own(watched: Watched) -> None:
    wait_for(lambda: len(watched.load.replies) >= 20 or watched.load.errors, "answers, if this test is the first")
    watched.load.stop()
    service, prometheus = watched.load.service, watched.prometheus
    usages = [reply["usage"] for reply in watched.load.replies]
    assert not watched.load.errors
    emitted = sum(usage["completion_tokens"] for usage in usages)
    wait_for(lambda: service.metrics()["emitted_tokens"] == emitted, "the last reports")
    metrics: MetricSummary = service.metrics()
    names = {
        "drafts_total": metrics["drafts"],
        "draft_tokens_total": metrics["draft_tokens"],
        "accepted_tokens_total": metrics["accepted_tokens"],
        "emitted_tokens_total": metrics["emitted_tokens"],
    }

    def wait_until(expr: str, value: float | None) -> None:
        """Prometheus shows nothing before its first scrape, nor after one that failed."""
        assert value is not None
        wait_for(lambda: [found for _, found in prometheus.values(expr)] == [pytest.approx(value, rel=1e-9)], expr)

    for name, value in names.items():
        wait_until(f'sum(truespec_{name}{{job="app"}})', value)
    selector = '{job="app"}'
    rate = f"sum(truespec_accepted_tokens_total{selector}) / sum(truespec_draft_tokens_total{selector})"
    wait_until(rate, metrics["acceptance_rate"])
    length = f"1 + sum(truespec_accepted_tokens_per_position_total{selector}) / sum(truespec_drafts_total{selector})"
    wait_until(length, metrics["mean_accepted_length"])
    delivered = sum(usage["completion_tokens_details"]["accepted_prediction_tokens"] for usage in usages)
    # Drafts that were accepted behind the last token of a request are counted, and not delivered.
    assert 0 < delivered <= metrics["accepted_tokens"] <= delivered + 4 * len(usages)


@pytest.mark.last  # some switch speculation off, and others of the service's figures end
@pytest.mark.parametrize("command", commands("promql", "curl", "logged"))
def test_the_commands_of_the_runbooks_run(watched: Watched, command: str, tmp_path: Path) -> None:
    watched.load.stop()  # one of them switches speculation off
    values = {
        "NAMESPACE": "", "RELEASE": "app", "HOST": watched.load.service.base_url, "PROMETHEUS": watched.prometheus.url,
        "ADMIN_TOKEN": TOKEN,
    }  # fmt: skip
    shown = run(command, tmp_path, values)
    rare = any(one in command for one in ("logged", " > 0", "held_out", "doubtful"))  # a tiny model has no head
    if not shown and not rare:
        wait_for(lambda: bool(run(command, tmp_path, values)), command, DATA_TIMEOUT_S)
    if " jq " in command or command.startswith("promql"):
        assert all(json.loads(line) for line in shown.splitlines())
