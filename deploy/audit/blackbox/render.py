"""An audit as terminal output and as sections of a Markdown page."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.audit.blackbox.audit import Audit
from deploy.audit.blackbox.probes import PROBES, Finding, Outcome, Verdict, shortened
from deploy.audit.mutants import MUTANTS
from deploy.bench.provenance import provenance
from deploy.sections import write_section

_STYLES = {Verdict.PASSED: "green", Verdict.FAILED: "bold red", Verdict.INCONCLUSIVE: "yellow"}
_COMMAND = "audit URL"
PROBES_MARK = f"<!-- {_COMMAND}: probes -->"
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
    counts = ", ".join(f"{audit.count(verdict)} {verdict}" for verdict in Verdict if audit.count(verdict))
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
    write_section(page, _COMMAND, name, "\n".join(lines), head=head)


def _row(outcome: Outcome) -> str:
    faults = dict.fromkeys(fault for finding in outcome.findings for fault in finding.faults)
    reported = "; ".join(dict.fromkeys(_seen(finding) for finding in outcome.findings)) or outcome.reported
    return f"| {outcome.probe} | {outcome.verdict} | {_cell(reported)} | {', '.join(faults)} |"


def _seen(finding: Finding) -> str:
    return f"{finding.observed} (expected {finding.expected}; {_times(finding)})"


def _times(finding: Finding) -> str:
    return "once" if finding.count == 1 else f"{finding.count} times"


def _cell(text: str) -> str:
    one_line = " ".join(text.split()).replace("|", "\\|")
    return one_line if len(one_line) <= _LONGEST_CELL else f"{one_line[:_LONGEST_CELL]}…"


def _plain(text: str) -> str:
    """Text escaped so that rich prints it unchanged."""
    return text.replace("[", "\\[")


def write_faults(rows: Sequence[tuple[str, str, Audit]], page: Path, head: str) -> None:
    """Write the rows of faults put back, (fault, how it was served, its audit), next to the existing rows."""
    found = provenance()
    origin = f"{found['date'][:10]}, commit {found['commit']}"
    lines = _faults_there(page) | {(fault, way): _fault_row(fault, way, audit, origin) for fault, way, audit in rows}
    order = {name: place for place, name in enumerate(("sound", *MUTANTS))}
    text = [
        "## Faults put back, audited from outside",
        "",
        "Written by `truespec audit faults --outside`, row by row. Each fault was served with a tiny model in float32, "
        "with the engine's own rules off, and audited once. Faults found only by `own alarms` were reported by the "
        "server's self-checks in its metrics; other servers have none.",
        "",
        "| fault | drafts | named | probes that failed | tokens replayed | from |",
        "|---|---|---|---|---:|---|",
        *(lines[key] for key in sorted(lines, key=lambda key: (order.get(key[0], len(order)), key))),
    ]
    write_section(page, _COMMAND, "faults", "\n".join(text), head=head)


def _fault_row(fault: str, way: str, audit: Audit, origin: str) -> str:
    own = fault.split()[0]
    named = "yes" if own in audit.faults else "as another" if audit.findings else "not seen"
    if own == "sound":
        named = "FALSE ALARM" if audit.findings else "nothing found"
    failed = ", ".join(one.probe for one in audit.outcomes if one.verdict is Verdict.FAILED)
    replayed = sum(one.figures.get("tokens", 0) for one in audit.outcomes if one.probe == "replayed logprobs")
    return f"| {fault} | {way} | {named} | {failed} | {replayed:,.0f} | {origin} |"


def _faults_there(page: Path) -> dict[tuple[str, str], str]:
    """The existing rows of the page, by fault and way."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    section = text.partition(f"<!-- {_COMMAND}: faults -->")[2].partition(f"<!-- end of {_COMMAND} -->")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| sound ", "| F"))]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    return {(cell[0], cell[1]): line for cell, line in zip(cells, rows, strict=True)}


def write_probes(page: Path, head: str) -> None:
    """Write the probes' questions into a section of a page."""
    lines = ["## The probes", "", "| probe | asks | needs |", "|---|---|---|"]
    lines += [f"| {one.name} | {_cell(one.asks)} | {'; '.join(one.needs)} |" for one in PROBES.values()]
    write_section(page, _COMMAND, "probes", "\n".join(lines), head=head)
