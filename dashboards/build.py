"""The files that Grafana and Prometheus read, and the chart's, which needs them before it is installed or packed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dashboards import sanity, serving, speculation
from dashboards.alerts import Alert
from dashboards.panels import Page, dashboard_json
from dashboards.queries import QueryScope
from dashboards.recordings import RECORDINGS

PAGES: tuple[Page, ...] = (
    serving.OVERVIEW,
    speculation.ACCEPTANCE,
    sanity.LOGPROB_SANITY,
    serving.DISAGGREGATION,
    serving.LATENCY,
)
ALERTS: tuple[Alert, ...] = (*sanity.ALERTS, *speculation.ALERTS, *serving.ALERTS)

# Metrics of OpenTelemetry's conventions for servers of models, and the histograms of ours that are the same.
GEN_AI_NAMES = {
    "gen_ai.server.request.duration": "request_duration_seconds",
    "gen_ai.server.time_to_first_token": "time_to_first_token_seconds",
}
# vLLM's names of what gateways and autoscalers choose a server by; truespec itself never exports these.
VLLM_NAMES = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
}
_CHART = Path("helm", "truespec", "dashboards")


def dashboards() -> list[dict[str, Any]]:
    """All pages as Grafana imports them."""
    return [dashboard_json(page) for page in PAGES]


def rule_file(form: Callable[[Alert], dict[str, Any]] = Alert.as_dict) -> dict[str, Any]:
    """Recording rules first, so that the alerts after them use values of the same evaluation."""
    recorded = [{"record": name, "expr": expr} for name, expr in RECORDINGS.items()]
    return {"groups": [_group("recording", recorded), _group("alerts", [form(alert) for alert in ALERTS])]}


def vllm_rule_file() -> dict[str, Any]:
    """Optional rules that also record our series under vLLM's names."""
    scope = QueryScope("", "5m")
    return {
        "groups": [
            _group("vllm-names", [{"record": name, "expr": scope.series(ours)} for name, ours in VLLM_NAMES.items()])
        ]
    }


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
    _write(root / _CHART, _boards() | {"rules/truespec.json": _json(rule_file(Alert.for_chart))})


def _group(name: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": f"truespec-{name}", "interval": "30s", "rules": rules}


def _write(folder: Path, files: Mapping[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def _boards() -> dict[str, str]:
    return {f"{page.slug}.json": _json(dashboard_json(page)) for page in PAGES}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    write_for_chart(Path(__file__).parents[1])
