"""The generated pages of the documentation: the metric catalogue and the runbooks."""

from collections.abc import Iterable

from dashboards import shell
from dashboards.alerts import ALERTS, Alert
from dashboards.label_meanings import Meaning, meaning_of
from dashboards.rules import GEN_AI_NAMES, VLLM_EXPRESSIONS, VLLM_NAMES
from serve_app.telemetry.metric_names import CATALOGUE, COMMON_LABELS, PREFIX, REPLICA_LABEL, Metric

_MADE_BY = "<!-- Made by `make generated`; not edited by hand. -->"


def metrics_page() -> str:
    """docs/metrics.md."""
    common = " and ".join(f"`{label}`" for label in COMMON_LABELS)
    return "\n".join(
        [
            "# Metrics",
            "",
            _MADE_BY,
            "",
            f"Every metric has the labels {common}; gauges also have `{REPLICA_LABEL}`, since they do not add up. "
            "Counters count from 0 at the start of the process that keeps them.",
            "",
            "The same counts are exported twice: by the application's own `/metrics` (sums over all replicas, which "
            "outlive a replica that dies) and by Ray's metrics agent on each node, with the prefix `ray_`. Scrape one "
            "of them, or both under different jobs; queries that do not keep `job` apart would count twice.",
            "",
            "Make means and shares from counters, and quantiles from histograms, whose `_sum` Ray's agent only "
            "estimates. Under Ray's agent a counter starts with its first event, which `increase` does not see; the "
            "rules and panels on single events add it.",
            "",
            *_table(CATALOGUE),
            "",
            "## Other names",
            "",
            "`rules/vllm-names.yaml`, which `truespec dashboards build` writes, records these series under vLLM's "
            "names, for dashboards made for vLLM or its production-stack; load it beside the other rules. Left out, as "
            "truespec has nothing like them, are `vllm:request_max_num_generation_tokens`, "
            "`vllm:iteration_tokens_total`, `vllm:request_params_*` and what production-stack's router exports.",
            "",
            "| vLLM | truespec |",
            "|---|---|",
            *(f"| `{name}` | `{PREFIX}{ours}` |" for name, ours in sorted(VLLM_NAMES.items())),
            *(f"| `{name}` | `{expr}` |" for name, expr in VLLM_EXPRESSIONS.items()),
            "",
            "OpenTelemetry's conventions have three metrics of a server; [tracing.md](tracing.md#metrics) shows how a "
            "collector gives them out.",
            "",
            "| OpenTelemetry | truespec |",
            "|---|---|",
            *(f"| `{name}` | `{PREFIX}{ours}` |" for name, ours in GEN_AI_NAMES.items()),
            "",
            "## What label values mean",
            "",
            *_meanings(),
        ]
    )


def _table(metrics: Iterable[Metric]) -> list[str]:
    rows = ["| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        buckets = f" Buckets up to {', '.join(f'{bound:g}' for bound in metric.buckets)}." if metric.buckets else ""
        meaning = (metric.help + buckets).replace("|", r"\|")
        rows.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {meaning} |")
    return rows


def _meanings() -> list[str]:
    """Each label with the metrics that have it in one meaning; the labels of all metrics first."""
    labelled: dict[str, list[tuple[Meaning, list[str]]]] = {
        **{label: [(meaning_of(CATALOGUE[0], label), ["every metric"])] for label in COMMON_LABELS},
        REPLICA_LABEL: [(meaning_of(CATALOGUE[0], REPLICA_LABEL), ["every gauge"])],
    }
    for metric in CATALOGUE:
        for label in metric.labels:
            groups, meaning = labelled.setdefault(label, []), meaning_of(metric, label)
            name = f"`{metric.name}`"
            same = next((names for known, names in groups if known is meaning), None)
            if same is None:
                groups.append((meaning, [name]))
            else:
                same.append(name)
    lines: list[str] = []
    for label, groups in labelled.items():
        lines += [f"### `{label}`", ""]
        for meaning, names in groups:
            if len(groups) > 1:
                lines += [f"Of {', '.join(names)}:", ""]
            lines += _meaning(meaning)
    return lines


def _meaning(meaning: Meaning) -> list[str]:
    if isinstance(meaning, str):
        return [meaning, ""]
    return [*(f"- `{value}`: {text}" for value, text in meaning.items()), ""]


def runbooks_page() -> str:
    """docs/runbooks.md."""
    lines = [
        "# Runbooks",
        "",
        _MADE_BY,
        "",
        "One section for each alert. A critical alert means that answers "
        "or logprobs may be wrong, that nobody would notice, or that nothing is served; a warning, that the service is "
        "slower than it should be. The chart's `monitoring.prometheusRule.alerts.NAME` changes `enabled`, `for`, "
        "`severity`, `labels`, and the `threshold` and `minimum` that are named here.",
        "",
        "The commands are for bash with curl, jq, kubectl and helm, after this:",
        "",
        "```bash",
        shell.SETUP,
        "```",
        "",
    ]
    for alert in ALERTS:
        lines += _section(alert)
    return "\n".join(lines)


def _section(alert: Alert) -> list[str]:
    limits = {"threshold": alert.threshold, "minimum": alert.minimum}
    limited = "".join(f"; {name} {value:g}" for name, value in limits.items() if value is not None)
    return [
        f"## {alert.name}",
        "",
        f"Severity {alert.severity}; {'at once' if alert.hold == '0m' else f'after {alert.hold}'}{limited}.",
        "",
        f"**What it means.** {alert.means}",
        "",
        f"**Where to look.** {alert.look}",
        "",
        f"**What to do.** {alert.do}",
        "",
        "```bash",
        *alert.commands,
        "```",
        "",
        "It fires on:",
        "",
        "```promql",
        alert.default_expr,
        "```",
        "",
    ]
