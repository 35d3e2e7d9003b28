"""A referee's report on the terminal, and what a CI makes of it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from deploy.reports import terminal
from deploy.reports.terminal import STYLES, print_facts
from deploy.watch import sentences
from deploy.watch.sentences import Report

FAIL_ON = {
    "alarm": "a detector raised an alarm",
    "suspect": "an answer is suspect by itself",
    "unread": "nothing could be compared, or more answers were unreadable than read",
    "untested": "the distribution of no answer was tested",
    "dropped": "exchanges were left out because the referee lagged behind",
}
"""For what a check may fail, and what each means."""

_SHORT = {
    "tokens": "tokens",
    "tme": "TME",
    "k3": "k3",
    "abs_nats": "abs",
    "max_nats": "max",
    "probability_z": "p(y) z",
    "surprisal_z": "-log p z",
}
_MOST_SUSPECT = 5  # shown; the JSON has all


def conclusion(report: Report, fail_on: Collection[str]) -> list[str]:
    """The reasons for which a check fails, as sentences; none = it passes.

    Args:
        report: as `Referee.report` returns it.
        fail_on: of `FAIL_ON`.

    Raises:
        ValueError: there is nothing of that name to fail on.
    """
    unknown = set(fail_on) - FAIL_ON.keys()
    if unknown:
        raise ValueError(f"Nothing fails on {sorted(unknown)}; there are {', '.join(FAIL_ON)}.")
    return [f"{name}: {text}." for name, text in sentences.shortcomings(report).items() if name in fail_on]


def print_report(report: Report, out: Console) -> None:
    """The verdict, then what it rests on."""
    verdict = sentences.headline(report)
    out.print(Text(f"{verdict.text}.", style=STYLES[sentences.KINDS[verdict.kind]]), soft_wrap=True)
    for note in sentences.notes(report):
        out.print(Text(f"{note}."), soft_wrap=True)
    for group in sentences.finding_groups(report["findings"]):
        out.print(Text(f"\n{group[0]['alarm']}", style="bold red"))
        print_facts(sentences.group_facts(group), out)
        out.print(Text("  shown by"))
        print_facts(sentences.example_facts(group[0]["example"]), out, indent=4)
    _print_suspect(report["suspect"], out)
    if report["all"]["tokens"]:
        _print_measures(report, out)
    out.print()
    for table in sentences.outcomes(report):
        out.print(terminal.table(table))
    out.print(Text("\nTolerance"))
    print_facts(sentences.tolerance_facts(report["tolerance"]), out)


def _print_suspect(suspect: Sequence[Mapping[str, Any]], out: Console) -> None:
    if not suspect:
        return
    latest = suspect[-_MOST_SUSPECT:]
    of_all = f", the latest {len(latest)} of {len(suspect)}" if len(latest) < len(suspect) else ""
    out.print(Text(f"\nAnswers that are suspect by themselves{of_all}", style="bold red"))
    for example in latest:
        print_facts(sentences.example_facts(example), out)
        out.print()


def _print_measures(report: Report, out: Console) -> None:
    out.print()
    out.print(terminal.table(sentences.measures(report["all"])))
    out.print(terminal.table(sentences.terms(report)))
    for title, groups in (("By stratum", report["strata"]), ("By replica", report["replicas"])):
        out.print(terminal.table(sentences.by_group(title, groups, _SHORT)))
