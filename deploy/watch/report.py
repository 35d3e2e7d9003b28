"""A referee's report on the terminal, and what a CI makes of it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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

_STYLES = {"alarm": "bold red", "suspect": "bold red", "nothing": "yellow", "clean": "green"}
_SHORT = ("tme", "k3", "abs_nats", "max_nats", "probability_z", "surprisal_z")
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
    out.print(Text(f"{verdict.text}.", style=_STYLES[verdict.kind]), soft_wrap=True)
    for note in sentences.notes(report):
        out.print(Text(f"{note}."), soft_wrap=True)
    for group in sentences.finding_groups(report["findings"]):
        out.print(Text(f"\n{group[0]['alarm']}", style="bold red"))
        _print_facts(sentences.group_facts(group), out)
        out.print(Text("  shown by"))
        _print_facts(sentences.example_facts(group[0]["example"]), out, indent=4)
    _print_suspect(report["suspect"], out)
    if report["all"]["tokens"]:
        _print_measures(report, out)
    out.print()
    out.print(_table("What became of it", ("", "result", "number", ""), sentences.outcome_rows(report), numbers=(2,)))
    for title, reasons in (("Unreadable", report["unreadable"]), ("Untested", report["untested"])):
        if reasons:
            out.print(_table(title, ("reason", "answers"), sentences.reason_rows(reasons), numbers=(1,)))
    out.print(Text("\nTolerance"))
    _print_facts(sentences.tolerance_facts(report["tolerance"]), out)


def _print_suspect(suspect: Sequence[Mapping[str, Any]], out: Console) -> None:
    if not suspect:
        return
    latest = suspect[-_MOST_SUSPECT:]
    of_all = f", the latest {len(latest)} of {len(suspect)}" if len(latest) < len(suspect) else ""
    out.print(Text(f"\nAnswers that are suspect each by itself{of_all}", style="bold red"))
    for example in latest:
        _print_facts(sentences.example_facts(example), out)
        out.print()


def _print_measures(report: Report, out: Console) -> None:
    rows = sentences.measure_rows(report["all"])
    title = (
        f"{sentences.count(report['all']['compared'], 'token')} with a logprob: g served, t replayed, r = exp(t - g)"
    )
    out.print()
    out.print(_table(title, ("measure", "value", "is", "trainers call it"), rows, numbers=(1,)))
    title = f"{sentences.count(report['all']['drawn'], 'token')} against the distribution"
    heads = ("term", "mean", "z", "tolerated", "is")
    out.print(_table(title, heads, sentences.term_rows(report), numbers=(1, 2, 3)))
    for title, groups in (("By stratum", report["strata"]), ("By replica", report["replicas"])):
        out.print(_table(title, _heads(), _rows(groups), numbers=range(1, 2 + len(_SHORT))))


def _heads() -> tuple[str, ...]:
    return "", "tokens", "TME", "k3", "abs", "max", "p(y) z", "-log p z"


def _rows(groups: Mapping[str, Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    for name, figures in groups.items():
        values = (sentences.measured("z" if key.endswith("_z") else key, figures[key]) for key in _SHORT)
        yield (sentences.plain(name), sentences.number(figures["tokens"]), *values)


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int]) -> Table:
    """Its cells are texts that rich prints unchanged."""
    table = Table(title=Text(title), title_justify="left")
    for place, head in enumerate(heads):
        is_number = place in numbers
        table.add_column(head, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _print_facts(facts: Mapping[str, str], out: Console, indent: int = 2) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        out.print(Text(f"{'':{indent}}{name:{width}}  {value}"), soft_wrap=True)
