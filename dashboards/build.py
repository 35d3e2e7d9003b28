"""The files that Grafana and Prometheus read, and the chart's, which needs them before it is installed or packed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboards.panels import Page, dashboard_json
from dashboards.rules import chart_rules, rule_file, vllm_rule_file
from dashboards.sanity import LOGPROB_SANITY
from dashboards.serving import DISAGGREGATION, LATENCY, OVERVIEW
from dashboards.speculation import ACCEPTANCE

PAGES: tuple[Page, ...] = (OVERVIEW, ACCEPTANCE, LOGPROB_SANITY, DISAGGREGATION, LATENCY)
_CHART = Path("helm", "truespec", "dashboards")


def dashboards() -> list[dict[str, Any]]:
    """All pages as Grafana imports them."""
    return [dashboard_json(page) for page in PAGES]


def server_files() -> dict[str, str]:
    """Name -> text of what Grafana and Prometheus read."""
    import yaml  # which `make chart` does without

    rules = {"truespec": rule_file(), "vllm-names": vllm_rule_file()}
    written = {
        name: yaml.safe_dump(file, sort_keys=False, allow_unicode=True, width=120) for name, file in rules.items()
    }
    return _boards() | {f"rules/{name}.yaml": text for name, text in written.items()}


def write(folder: Path) -> list[str]:
    """Write what servers read below `folder`; returns the names."""
    return _write(folder, server_files())


def write_for_chart(root: Path) -> None:
    """Write what the chart of a checkout makes ConfigMaps and a PrometheusRule of; Python alone is enough."""
    _write(root / _CHART, _boards() | {"rules/truespec.json": _json(chart_rules())})


def _write(folder: Path, files: Mapping[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def _boards() -> dict[str, str]:
    return {f"{page.uid.removeprefix('truespec-')}.json": _json(dashboard_json(page)) for page in PAGES}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    write_for_chart(Path(__file__).parents[1])
