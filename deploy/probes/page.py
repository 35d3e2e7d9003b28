"""An audit as one self-contained HTML file."""

import json
from collections.abc import Iterable, Iterator

from deploy.probes.audit import Audit
from deploy.probes.probes import AuditFinding, ProbeOutcome, shortened
from deploy.probes.render import KINDS, summary
from deploy.reports import plots
from deploy.reports.html_pages import card, document, escaped, facts, figures, findings, table
from deploy.reports.model import Cell, ReportTable, Shown


def html_page(audit: Audit) -> str:
    """The whole file."""
    title = f"Audit of {audit.facts['model']}"
    verdict = '<span class="bad">findings</span>' if audit.findings else '<span class="ok">no findings</span>'
    parts = [
        f"<h1>{escaped(title)}: {verdict}</h1>",
        f'<p class="lead">{escaped(audit.url)}. {escaped(summary(audit))}</p>',
        findings(map(_shown, audit.findings)),
        f"<h2>Probes</h2>{_probes(audit.outcomes)}",
        figures("Plots", _plots(audit.outcomes)),
        f"<h2>What was audited, and how</h2>{card(facts({name: _reported(one) for name, one in audit.facts.items()}))}",
    ]
    return document(title, parts)


def _shown(one: AuditFinding) -> Shown:
    facts_of = {"expected": one.expected, "observed": one.observed, "seen": f"{one.count} times"}
    request = json.dumps(shortened(one.request), ensure_ascii=False) if one.request else ""
    return Shown(", ".join(one.faults), facts_of, "A request that shows it", request, where=one.probe)


def _probes(outcomes: Iterable[ProbeOutcome]) -> str:
    rows = [
        (Cell(one.probe, detail=one.asks), Cell(one.verdict, KINDS[one.verdict]), one.reported, str(one.num_requests))
        for one in outcomes
    ]
    columns = ("probe", "verdict", "what was seen", "requests")
    return card(table(ReportTable("", columns, rows, optional=(3,))))


def _plots(outcomes: Iterable[ProbeOutcome]) -> Iterator[str]:
    for outcome in outcomes:
        series = outcome.series
        for name, values in series.items():
            if outcome.probe == "distribution of the tokens":
                yield plots.histogram(values, f"{name}: surprisal - entropy, nats; 0 on average if correct")
            elif name == "drift, nats":
                yield plots.log_histogram(values, "logprobs: |served - recomputed|, nats")
            elif name.endswith(": observed"):
                place = name.removesuffix(": observed")
                label = f"{place} of many answers: bars observed, marks expected"
                yield plots.compared(values, series[f"{place}: expected"], label)
            elif not name.endswith(": expected"):
                yield plots.line(values, f"{outcome.probe}: {name}")


def _reported(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_reported(each)}" for name, each in value.items()) or "none"
    return (
        {True: "yes", False: "no", None: "unknown"}[value] if value is None or isinstance(value, bool) else str(value)
    )
