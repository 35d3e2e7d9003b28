"""An audit as terminal output and as sections of a Markdown page."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.probes.audit import Audit
from deploy.probes.probes import PROBES, AuditFinding, ProbeOutcome, ProbeVerdict, shortened
from deploy.reports.provenance import provenance
from deploy.reports.sections import write_section

_STYLES = {ProbeVerdict.PASSED: "green", ProbeVerdict.FAILED: "bold red", ProbeVerdict.INCONCLUSIVE: "yellow"}
SECTION = "audit URL"
PROBES_MARK = f"<!-- {SECTION}: probes -->"
_LONGEST_CELL = 220


def print_audit(audit: Audit, out: Console) -> None:
    """The probes as a table, then every finding with its request."""
    table = Table(title=_plain(f"Audit of {audit.facts['model']} at {audit.url}"))
    for heading in ("probe", "verdict", "what was seen"):
        table.add_column(heading)
    for outcome in audit.outcomes:
        verdict = f"[{_STYLES.get(outcome.verdict, 'dim')}]{outcome.verdict}[/]"
        table.add_row(outcome.probe, verdict, _plain(outcome.reported))
    out.print(table)
    for finding in audit.findings:
        out.print(f"\n[bold red]{', '.join(finding.faults)}[/]  ({finding.probe}, seen {_times(finding)})")
        out.print(f"  expected  {_plain(finding.expected)}\n  observed  {_plain(finding.observed)}", soft_wrap=True)
        if finding.request:
            out.print(f"  request   {_plain(json.dumps(shortened(finding.request)))}", soft_wrap=True)
    out.print(f"\n{summary(audit)}")


def summary(audit: Audit) -> str:
    """A one-line summary."""
    counts = ", ".join(f"{audit.count(verdict)} {verdict}" for verdict in ProbeVerdict if audit.count(verdict))
    verdict = f"{len(audit.findings)} findings" if audit.findings else "no findings"
    return f"{verdict}; probes: {counts}; {audit.num_requests} requests in {audit.seconds:.0f} s."


def write_page(audit: Audit, page: Path, name: str, head: str) -> None:
    """Write the audit into a section of a page."""
    found = provenance()
    lines = [
        f"## {name}",
        "",
        f"`{found['command']}`: {found['date']}, commit {found['commit']}, {found['cpu']}. {summary(audit)}",
        "",
        "| probe | verdict | what was seen | looks like |",
        "|---|---|---|---|",
    ]
    lines += [_row(outcome) for outcome in audit.outcomes]
    write_section(page, SECTION, name, "\n".join(lines), head=head)


def _row(outcome: ProbeOutcome) -> str:
    faults = dict.fromkeys(fault for finding in outcome.findings for fault in finding.faults)
    reported = "; ".join(dict.fromkeys(_seen(finding) for finding in outcome.findings)) or outcome.reported
    return f"| {outcome.probe} | {outcome.verdict} | {_cell(reported)} | {', '.join(faults)} |"


def _seen(finding: AuditFinding) -> str:
    return f"{finding.observed} (expected {finding.expected}; {_times(finding)})"


def _times(finding: AuditFinding) -> str:
    return "once" if finding.count == 1 else f"{finding.count} times"


def _cell(text: str) -> str:
    one_line = " ".join(text.split()).replace("|", "\\|")
    return one_line if len(one_line) <= _LONGEST_CELL else f"{one_line[:_LONGEST_CELL]}…"


def _plain(text: str) -> str:
    """Text escaped so that rich prints it unchanged."""
    return text.replace("[", "\\[")


def write_probes(page: Path, head: str) -> None:
    """Write the probes' questions into a section of a page."""
    lines = ["## The probes", "", "| probe | asks | needs |", "|---|---|---|"]
    lines += [f"| {one.name} | {_cell(one.asks)} | {'; '.join(one.needs)} |" for one in PROBES.values()]
    write_section(page, SECTION, "probes", "\n".join(lines), head=head)
