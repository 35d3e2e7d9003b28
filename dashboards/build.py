"""Files made from the catalogue, the panels and the rules: those that Grafana and Prometheus read, and the chart's."""

import json
from pathlib import Path
from typing import Any

import yaml

from dashboards.panels import Page, dashboard_json
from dashboards.rules import chart_rules, rule_file, vllm_rule_file
from dashboards.sanity import LOGPROB_SANITY
from dashboards.serving import DISAGGREGATION, LATENCY, OVERVIEW
from dashboards.speculation import ACCEPTANCE

PAGES: tuple[Page, ...] = (OVERVIEW, ACCEPTANCE, LOGPROB_SANITY, DISAGGREGATION, LATENCY)


def dashboards() -> list[dict[str, Any]]:
    """All pages as Grafana imports them."""
    return [dashboard_json(page) for page in PAGES]


def server_files() -> dict[str, str]:
    """Name -> text of what Grafana and Prometheus read."""
    return _boards() | {"rules/truespec.yaml": _yaml(rule_file()), "rules/vllm-names.yaml": _yaml(vllm_rule_file())}


def chart_files() -> dict[str, str]:
    """Name -> text of what the chart makes ConfigMaps and a PrometheusRule of."""
    return _boards() | {"rules.yaml": _yaml(chart_rules())}


def write(folder: Path) -> list[str]:
    """Write what servers read below `folder`; returns the names."""
    made = server_files()
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return list(made)


def _boards() -> dict[str, str]:
    return {f"{page.uid.removeprefix('truespec-')}.json": _board(dashboard_json(page)) for page in PAGES}


def _board(page: dict[str, Any]) -> str:
    """JSON with a line for each panel, so that a change of one is a change of one line."""
    panels = ",\n".join(json.dumps(panel, ensure_ascii=False) for panel in page["panels"])
    head = json.dumps({name: value for name, value in page.items() if name != "panels"}, ensure_ascii=False)
    return f'{head[:-1]}, "panels": [\n{panels}\n]}}\n'


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
