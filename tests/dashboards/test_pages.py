"""The generated files are current; every page validates, reads well, and asks only for what the code exports."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from dashboards import build
from dashboards.alerts import Alert
from dashboards.build import ALERTS
from dashboards.panels import ANNOTATIONS, PAGE, VISIBLE, Page, Panel
from dashboards.queries import QueryScope
from dashboards.recordings import RECORDINGS
from dashboards.reference import runbooks_page
from deploy.cli.main import main
from serve_app.telemetry.metric_names import CATALOGUE, METRICS
from tests.support.loops import for_each
from tests.support.project_files import ROOT

# From Grafana's own types, by schema/make_schema.sh; closed to fields that Grafana does not know.
SCHEMA = json.loads((Path(__file__).parent / "schema" / "dashboard.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket",)}
PANELS = [(page, panel) for page in build.PAGES for panel in page.panels]
MARKED = [(annotation["target"]["expr"], annotation["textFormat"]) for annotation in ANNOTATIONS]
UNITS = {"none", "percentunit", "s", "ops", "reqps", "bytes", "Bps"}


def names(expr: str) -> set[str]:
    """The series an expression reads."""
    return set(re.findall(r"(?<![\w:])(?:truespec|vllm|ray)_\w+(?![\w:(])", expr))


def exported() -> set[str]:
    return {metric.name + suffix for metric in CATALOGUE for suffix in SUFFIXES[metric.kind]}


each_panel = for_each(PANELS, lambda pair: f"{pair[0].slug}: {pair[1].title}")
each_page = for_each(build.dashboards(), lambda page: page["uid"])


# Generated files


def test_build_writes_what_servers_read(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["dashboards", "build", "--out", str(tmp_path)])
    assert result.exit_code == 0
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*")}
    assert written == build.server_files()
    assert json.loads(written["overview.json"]) == build.dashboards()[0]
    rules = [rule for group in yaml.safe_load(written["rules/truespec.yaml"])["groups"] for rule in group["rules"]]
    assert [rule.get("alert") or rule["record"] for rule in rules] == [*RECORDINGS, *(alert.name for alert in ALERTS)]


def test_there_are_no_more_than_somebody_looks_at() -> None:
    """A new one names what it replaces."""
    assert len(CATALOGUE) <= 75
    assert len(ALERTS) <= 26
    assert len(PANELS) <= 80


# Grafana JSON


@each_page
def test_pages_validate_against_grafanas_own_types(page: dict[str, Any]) -> None:
    errors = [*VALIDATOR.iter_errors(page)]
    assert not errors, jsonschema.exceptions.best_match(errors)


@each_page
def test_panels_fill_the_grid_without_overlap(page: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for row in (panel for panel in page["panels"] if panel["type"] == "row"):
        assert bool(row["panels"]) is row["collapsed"], "Grafana drops a row's panels that are in the wrong place"
    shown = [inner for panel in page["panels"] for inner in (panel, *panel.get("panels", ()))]
    for panel in page["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in shown]
    assert len(ids) == len(set(ids))
    assert len(page["uid"]) <= 40, "Grafana's limit"


# Lint


@each_panel
def test_a_panel_says_what_it_shows_of_what_is_exported(pair: tuple[Page, Panel]) -> None:
    _, panel = pair
    assert panel.title and not panel.title.endswith(".")
    assert len(panel.description) > 60 and panel.description.endswith("."), "what a bad value means"
    assert panel.unit in UNITS
    assert panel.steps[0][0] is None
    for expr, text in [(query.expr, query.legend) for query in panel.queries] + MARKED:
        assert names(expr) <= exported(), expr
        assert text
        for label in re.findall(r"{{(\w+)}}", text):
            assert re.search(rf"(by|group_left) \([^)]*\b{label}\b", expr), (label, expr)


@each_panel
def test_a_query_keeps_to_the_choices_of_the_page(pair: tuple[Page, Panel]) -> None:
    _, panel = pair
    for query in panel.queries:
        if "ALERTS" in query.expr:
            continue
        now = re.sub(r"last_over_time\([^)]*\) and on \([^)]*\) \([^)]*\)", "", query.expr)  # where series begin
        selectors = re.findall(r"truespec_\w+(\{[^}]*\})?", now)
        assert selectors
        assert all(PAGE.matchers in selector for selector in selectors), query.expr
        window = VISIBLE.window if query.instant else PAGE.window
        assert set(re.findall(r"\[([^\]:]*)", now)) <= {window}, query.expr


@each_page
def test_a_page_shows_one_release_unless_asked_for_all(page: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in page["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "job", "model", "pool", "replica"]
    namespace = variables["namespace"]
    assert not namespace["multi"] and "current" not in namespace, "the first one, or all where there is none"
    assert (namespace["includeAll"], namespace["allValue"]) == (True, ".*"), "series without a namespace are found too"
    for name, chosen in {
        "job": ["namespace"],
        "model": ["namespace", "job"],
        "pool": ["namespace", "job", "model"],
        "replica": ["namespace", "job", "model", "pool"],
    }.items():
        assert re.findall(r"\$(\w+)", variables[name]["query"]["query"]) == chosen


@each_panel
def test_a_replica_is_chosen_in_gauges_alone(pair: tuple[Page, Panel]) -> None:
    """The app's own counters are sums over all replicas, and have no such label: a choice would empty the panel."""
    chosen = [query for query in pair[1].queries if "$replica" in query.expr]
    for query in chosen:
        assert {METRICS[name].kind for name in names(query.expr)} == {"gauge"}
    if any(name in str(pair[1].queries) for name in ("breaker_state", "kv_cache_usage", "requests_running")):
        assert chosen or pair[1].kind == "stat"


def test_every_metric_is_shown_somewhere() -> None:
    shown = set().union(*(names(query.expr) for _, panel in PANELS for query in panel.queries))
    assert METRICS.keys() - {name.removesuffix("_bucket") for name in shown} == set(), "nobody would see these"


# Series of Ray Serve's proxies and controller, and where Ray's source names them (without `ray_` and `_total`).
RAYS_OWN = {
    "ray_serve_application_status": ("application_state.py", '"serve_application_status"'),
    "ray_serve_haproxy_process_count": ("haproxy_metrics.py", '"serve_haproxy_process_count"'),
    "ray_serve_num_http_requests_total": ("request_ingress_metrics.py", 'f"serve_num_{protocol_name}_requests"'),
}


def test_rays_own_series_are_named_as_in_ray() -> None:
    (ray,) = importlib.util.find_spec("ray").submodule_search_locations  # type: ignore[union-attr, misc]
    for file, name in RAYS_OWN.values():
        source = (Path(ray) / "serve" / "_private" / file).read_text(encoding="utf-8")
        assert name in source
        assert file != "request_ingress_metrics.py" or '"status_code"' in source


@for_each([*RECORDINGS.values(), *(alert.expr for alert in ALERTS)])
def test_a_rule_asks_only_for_metrics_that_are_exported_or_recorded(expr: str) -> None:
    assert names(expr) <= exported() | RAYS_OWN.keys()
    recorded = set(re.findall(r"\w+:truespec_\w+:\w+", expr))
    assert recorded <= RECORDINGS.keys()
    assert names(expr) or recorded


@for_each(ALERTS, lambda alert: alert.name)
def test_an_alert_has_a_runbook_and_quotes_labels_that_it_keeps(alert: Alert) -> None:
    assert f"## {alert.name}\n" in runbooks_page()
    assert alert.as_dict()["annotations"]["runbook"] == f"docs/runbooks.md#{alert.name.lower()}"
    exprs = [alert.expr, *(expr for name, expr in RECORDINGS.items() if name in alert.expr)]
    for label in re.findall(r"\$labels\.(\w+)", alert.summary):
        kept = rf'by \([^)]*\b{label}\b|, "{label}", "'  # or given by label_replace
        assert any(re.search(kept, expr) for expr in exprs), label


# Queries


@pytest.mark.parametrize(("name", "where"), [("draft_total", ""), ("drafts_total", 'position="0"')])
def test_a_query_for_what_is_not_there_is_refused(name: str, where: str) -> None:
    with pytest.raises(ValueError, match="truespec_draft"):
        QueryScope("", "5m").rate(name, where=where)


# Names that others give to what we export

# What the endpoint picker of the Gateway API's inference extension, and production-stack's autoscaler, ask of a server.
ASKED = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}


def test_what_a_gateway_asks_for_is_recorded_under_vllms_names() -> None:
    rules = {rule["record"]: rule["expr"] for group in build.vllm_rule_file()["groups"] for rule in group["rules"]}
    assert rules.keys() == ASKED
    assert all(METRICS[expr].kind == "gauge" for expr in rules.values())


def test_the_names_of_opentelemetry_are_of_histograms_and_on_the_page_of_traces() -> None:
    text = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
    for name, ours in build.GEN_AI_NAMES.items():
        assert METRICS[f"truespec_{ours}"].kind == "histogram"
        assert f"`truespec_{ours}` to `{name}`" in " ".join(text.split())
