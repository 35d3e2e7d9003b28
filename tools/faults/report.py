"""Results of the audits, for people: a table to print, and a page to keep."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy.reports.model import ReportTable
from speculative.selfcheck.monitor import DELTA
from speculative.stats import CHECKS
from tools import markdown
from tools.faults.run import MAX_POSITIONS, MAX_REQUESTS, REPLAY_SHARE, VOCAB_SIZE, CleanRun, MutantAudit, pooled
from tools.markdown import write_section
from tools.provenance import provenance

_NOTHING = "NOT FOUND"
_COMMAND = "audit"
_PAGE_COLUMNS = ("fault", "detectors, with the delay of each", "found after", "acceptance (without the fault)")
_HEAD = """# Which fault is found by what, and when

Faults that were seen in real systems are put back into an engine, which then serves until they are found, and as long
again. Correct engines serve for a long time, and nothing may alarm. Each section was written by the command it names.
"""


def detection_table(findings: Sequence[MutantAudit]) -> ReportTable:
    """Fault, detectors, delay, acceptance."""
    columns = ("fault", "detectors, first to fire first", "found after", "acceptance (sound)")
    rows = [(one.fault, _detectors(one), _delay(one), _acceptance(one)) for one in findings]
    return ReportTable("Who finds which fault, and when", columns, rows)


def write_detection(findings: Sequence[MutantAudit], page: Path) -> None:
    """Write the table of mutants into the page."""
    lines = [
        "## Faults put back",
        "",
        _origin(),
        "",
        f"Faults of sampling are served from a table of {VOCAB_SIZE} tokens for at most {MAX_POSITIONS:,} positions, "
        f"all others by a tiny decoder for at most {MAX_REQUESTS} requests. The decoder's clients abort requests and "
        "continue conversations, and its KV cache is too small for all of them; where a fault needs it, a model "
        "drafts, prompts are handed off, or the weights are updated time and again. Faults between a client's request "
        "and the engine are served by a front end over a tiny model; all its replies are read "
        "as they went over the wire (`wire`). "
        f"{REPLAY_SHARE:.0%} of the answers are replayed by an engine without the fault (in F30 with it). `term x` is "
        f"a self-check that alarmed (false alarms: at most {DELTA:g} each over an engine's life), `invariant` a rule "
        "that every step must keep: the request that broke it was failed. Each fault was served once, so a delay shows "
        "its order of magnitude.",
        "",
        markdown.table(replace(detection_table(findings), columns=_PAGE_COLUMNS)),
    ]
    lines += ["", "The terms:", ""]
    lines += [f"- `{check}`: {meaning}." for check, meaning in CHECKS.items()]
    write_section(page, _COMMAND, "mutants", "\n".join(lines), head=_HEAD)


def write_clean(runs: Sequence[CleanRun], page: Path, what: str) -> None:
    """Write the clean runs into the page; `what`: the model they were served by."""
    terms = [
        (f"`{check}`", f"{sums.num:,}", f"{sums.mean:+.2e}", f"{sums.z:+.2f}") for check, sums in pooled(runs).items()
    ]
    lines = [
        f"## Sound engines: {what}",
        "",
        f"{_origin()} Nothing may alarm.",
        "",
        markdown.table(clean_table(runs)),
        "",
        "All settings together:",
        "",
        markdown.table(ReportTable("", ("term", "draws", "mean", "z"), terms, numbers=(1, 2, 3))),
    ]
    write_section(page, _COMMAND, f"clean, {what}", "\n".join(lines), head=_HEAD)


def clean_table(runs: Sequence[CleanRun]) -> ReportTable:
    """Settings, positions, alarms, the worst term."""
    columns = ("setting", "positions", "alarms and violations", "worst |z| of a term")
    rows = [(run.setting, f"{run.num_positions:,}", _reported(run), f"{run.worst_z:.2f}") for run in runs]
    return ReportTable("Sound engines: nothing may alarm", columns, rows, numbers=(1, 3))


def _reported(run: CleanRun) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in (run.alarms | run.violations).items()) or "none"


def _origin() -> str:
    found = provenance()
    return f"`{found['command']}`: {found['date']}, commit {found['commit']}, {found['cpu']}."


def _detectors(finding: MutantAudit) -> str:
    return ", ".join(f"{name} ({delay:,})" for name, delay in finding.detectors.items()) or _NOTHING


def _delay(finding: MutantAudit) -> str:
    return _NOTHING if finding.delay is None else f"{finding.delay:,} {finding.unit}"


def _acceptance(finding: MutantAudit) -> str:
    return f"{finding.acceptance:.1%} ({finding.sound_acceptance:.1%})"
