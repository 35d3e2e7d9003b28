"""An audit as terminal output and as sections of a Markdown page."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from deploy.probes.audit import Audit
from deploy.probes.probes import PROBES, AuditFinding, ProbeOutcome, ProbeVerdict, shortened
from deploy.reports import markdown, terminal
from deploy.reports.markdown import write_section
from deploy.reports.model import Cell, Kind, ReportTable
from deploy.reports.provenance import provenance

KINDS: Mapping[ProbeVerdict, Kind] = {
    ProbeVerdict.PASSED: "ok",
    ProbeVerdict.FAILED: "bad",
    ProbeVerdict.INCONCLUSIVE: "unclear",
    ProbeVerdict.UNSUPPORTED: "none",
}
"""Kind in which each is shown."""
SECTION = "audit URL"
PROBES_MARK = f"<!-- {SECTION}: probes -->"
_LONGEST_CELL = 220


def print_audit(audit: Audit, out: Console) -> None:
    """The probes as a table, then every finding with its request."""
    rows = [(one.probe, Cell(one.verdict, KINDS[one.verdict]), one.reported) for one in audit.outcomes]
    title = f"Audit of {audit.facts['model']} at {audit.url}"
    out.print(terminal.table(ReportTable(title, ("probe", "verdict", "what was seen"), rows)))
    for finding in audit.findings:
        out.print(f"\n[bold red]{', '.join(finding.faults)}[/]  ({finding.probe}, seen {_times(finding)})")
        request = {"request": json.dumps(shortened(finding.request))} if finding.request else {}
        terminal.print_facts({"expected": finding.expected, "observed": finding.observed, **request}, out)
    out.print(f"\n{summary(audit)}")


def summary(audit: Audit) -> str:
    """A one-line summary."""
    counts = ", ".join(f"{audit.count(verdict)} {verdict}" for verdict in ProbeVerdict if audit.count(verdict))
    verdict = f"{len(audit.findings)} findings" if audit.findings else "no findings"
    return f"{verdict}; probes: {counts}; {audit.num_requests} requests in {audit.seconds:.0f} s."


def write_page(audit: Audit, page: Path, name: str, head: str) -> None:
    """Write the audit into a section of a page."""
    found = provenance()
    origin = f"`{found['command']}`: {found['date']}, commit {found['commit']}, {found['cpu']}. {summary(audit)}"
    columns = ("probe", "verdict", "what was seen", "looks like")
    table = markdown.table(ReportTable("", columns, [_row(outcome) for outcome in audit.outcomes]))
    write_section(page, SECTION, name, f"## {name}\n\n{origin}\n\n{table}", head=head)


def _row(outcome: ProbeOutcome) -> tuple[str, ...]:
    faults = dict.fromkeys(fault for finding in outcome.findings for fault in finding.faults)
    seen = dict.fromkeys(f"{one.observed} (expected {one.expected}; {_times(one)})" for one in outcome.findings)
    reported = " ".join(("; ".join(seen) or outcome.reported).split())
    if len(reported) > _LONGEST_CELL:
        reported = f"{reported[:_LONGEST_CELL]}…"
    return outcome.probe, outcome.verdict, reported, ", ".join(faults)


def _times(finding: AuditFinding) -> str:
    return "once" if finding.count == 1 else f"{finding.count} times"


def write_probes(page: Path, head: str) -> None:
    """Write the probes' questions into a section of a page."""
    rows = [(one.name, one.asks, "; ".join(one.needs)) for one in PROBES.values()]
    table = markdown.table(ReportTable("", ("probe", "asks", "needs"), rows))
    write_section(page, SECTION, "probes", f"## The probes\n\n{table}", head=head)
