"""The generated pages of the documentation: the metric catalogue, the runbooks and the table of alerts."""

from collections.abc import Mapping

from dashboards import shell
from dashboards.alerts import MAY_BE_WRONG
from dashboards.build import ALERTS, GEN_AI_NAMES, VLLM_NAMES
from serve_app.referee.judge.strata import STRATA
from serve_app.telemetry.metric_names import CATALOGUE, COMMON_LABELS, COMMON_MEANINGS, PREFIX, REPLICA_LABEL, Meaning
from speculative.stats import CHECKS

_RAYS_OWN = "Where only `/metrics` is scraped, `ray_…` series are missing, and the parts on them never fire."
_MADE_BY = "<!-- Made by `make generated`; not edited by hand. -->"


def metrics_page() -> str:
    """docs/metrics.md."""
    common = " and ".join(f"`{label}`" for label in COMMON_LABELS)
    rows = ["| metric | kind | meaning, and that of its labels |", "|---|---|---|"]
    for metric in CATALOGUE:
        parts = [metric.text, *(f"`{label}`: {_inline(meaning)}." for label, meaning in metric.meanings.items())]
        if metric.buckets:
            parts.append(f"Buckets up to {', '.join(f'{bound:g}' for bound in metric.buckets)}.")
        meaning = " ".join(parts).replace("|", r"\|")
        rows.append(f"| `{metric.name}` | {metric.kind} | {meaning} |")
    sections: dict[str, Mapping[str, Meaning]] = {
        "`model_name` and `pool`": COMMON_MEANINGS,
        "`stratum`": STRATA,
        "`check`": CHECKS,
    }
    listed = [
        f"## {title}\n\n" + "\n".join(f"- `{value}`: {_inline(text)}" for value, text in meanings.items())
        for title, meanings in sections.items()
    ]
    names = [f"| `{name}` | `{PREFIX}{ours}` |" for name, ours in (VLLM_NAMES | GEN_AI_NAMES).items()]
    return _page(
        "# Metrics",
        _MADE_BY,
        f"Every metric has the labels {common}; gauges also have `{REPLICA_LABEL}`, since they do not add up. "
        "The application's `/metrics` has the sums over all replicas, which outlive a replica that dies; counters "
        "count from 0 at the start of truespec's controller. Each replica answers the same: scrape one address.",
        "Make means and shares from counters, and quantiles from histograms. A counter with labels starts with its "
        "first event, which `increase` does not see; the rules and panels on single events add it.",
        "\n".join(rows),
        *listed,
        "## Other names",
        "`rules/vllm-names.yaml`, which `truespec dashboards build` writes, records what gateways and autoscalers "
        "choose a server by under vLLM's names; load it beside the other rules if yours asks for them. "
        "[tracing.md](tracing.md#metrics) shows how a collector gives out OpenTelemetry's metrics of a server.",
        "\n".join(["| theirs | truespec |", "|---|---|", *names]),
    )


def _page(*paragraphs: str) -> str:
    return "\n\n".join(paragraphs) + "\n"


def _inline(meaning: Meaning) -> str:
    if meaning is CHECKS:
        return "[below](#check)"
    if isinstance(meaning, str):
        return meaning
    return "; ".join(f"`{value}` {text}" for value, text in meaning.items())


def alerts_table() -> str:
    """The table of operations.md: all alerts by whether answers may be wrong."""
    rows = ["| may answers be wrong? | alerts, without `Truespec` |", "|---|---|"]
    for wrong, text in MAY_BE_WRONG.items():
        links = [
            f"[{alert.name.removeprefix('Truespec')}](runbooks.md#{alert.name.lower()})"
            + (f" ({alert.note})" if alert.note else "")
            for alert in ALERTS
            if alert.wrong == wrong
        ]
        rows.append(f"| {text} | {', '.join(links)} |")
    return "\n".join(rows)


def runbooks_page() -> str:
    """docs/runbooks.md."""
    runbooks = []
    for alert in ALERTS:
        limited = "".join(f"; {name} {value:g}" for name, value in alert.limits.items())
        held = "at once" if alert.hold == "0m" else f"after {alert.hold}"
        runbooks += [
            f"## {alert.name}",
            f"Severity {alert.severity}; {held}{limited}.",
            f"**What it means.** {alert.means}",
            f"**Where to look.** {alert.look}",
            f"**What to do.** {alert.do}",
            "\n".join(["```bash", *alert.commands, "```"]),
            "It fires on:",
            f"```promql\n{alert.default_expr}\n```",
            *([_RAYS_OWN] if "ray_" in alert.default_expr else []),
        ]
    return _page(
        "# Runbooks",
        _MADE_BY,
        "One section for each alert. A critical alert means that answers or logprobs may be wrong, that nobody would "
        "notice, or that nothing is served; a warning, that the service is slower than it should be. The chart's "
        "`monitoring.prometheusRule.alerts.NAME` changes `enabled`, `for`, `severity`, `labels`, and the `threshold` "
        "and `minimum` that are named here.",
        "The commands are for bash with curl, jq, kubectl and helm, after this:",
        f"```bash\n{shell.SETUP}\n```",
        *runbooks,
    )
