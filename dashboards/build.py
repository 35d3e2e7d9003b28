"""Files that are generated from the catalogue, the panels and the rules, and whether those that are there are up to
date."""

import json
from pathlib import Path
from typing import Any

import yaml

from dashboards.panels import Page, dashboard_json
from dashboards.reference import metrics_page, runbooks_html, runbooks_page
from dashboards.rules import chart_alerts, rule_file, vllm_rule_file
from dashboards.sanity import LOGPROB_SANITY
from dashboards.serving import DISAGGREGATION, LATENCY, OVERVIEW
from dashboards.speculation import ACCEPTANCE

PAGES: tuple[Page, ...] = (OVERVIEW, ACCEPTANCE, LOGPROB_SANITY, DISAGGREGATION, LATENCY)
ROOT = Path(__file__).parents[1]

_GENERATED = "dashboards/generated"
_YAML_HEADER = "# Made by `truespec dashboards build`; not edited by hand.\n"


def files() -> dict[str, str]:
    """Path below the root -> text, of every generated file."""
    made = {}
    for page in PAGES:
        text = json.dumps(dashboard_json(page), indent=2, ensure_ascii=False) + "\n"
        made[f"{_GENERATED}/{page.uid.removeprefix('truespec-')}.json"] = text
    return made | {
        f"{_GENERATED}/rules/truespec.yaml": _yaml(rule_file()),
        f"{_GENERATED}/alerts.yaml": _yaml(chart_alerts()),
        f"{_GENERATED}/rules/vllm-names.yaml": _yaml(vllm_rule_file()),
        "docs/metrics.md": metrics_page(),
        "docs/runbooks.md": runbooks_page(),
        "serve_app/page/static/runbooks.html": runbooks_html(),
    }


def dashboards() -> list[dict[str, Any]]:
    """All pages as Grafana imports them."""
    return [dashboard_json(page) for page in PAGES]


def write(root: Path = ROOT) -> list[str]:
    """Bring the generated files below `root` up to date; returns the paths that changed."""
    changed = stale(root)
    made = files()
    for path in changed:
        target = root / path
        if path in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(made[path], encoding="utf-8")
        else:
            target.unlink()
    return changed


def stale(root: Path = ROOT) -> list[str]:
    """Generated files below `root` that are missing, out of date, or no longer generated."""
    made = files()
    old = [
        path
        for path, text in made.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
    present = {str(path.relative_to(root)) for path in (root / _GENERATED).rglob("*") if path.is_file()}
    return sorted({*old, *(present - made.keys())})


def _yaml(value: Any) -> str:
    return _YAML_HEADER + yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
