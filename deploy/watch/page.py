"""A referee's report as one self-contained HTML file."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploy.reports import plots
from deploy.reports.html_pages import card, document, escaped, facts, table
from deploy.watch import sentences
from deploy.watch.sentences import Report
from serve_app.telemetry.metric_names import STRATA

_CLASSES = {"alarm": "bad", "suspect": "bad", "nothing": "unclear", "clean": "ok"}
_FIGURES = (
    *((key, name) for key, (name, _, _) in sentences.MEASURES.items()),
    ("probability_z", "p(y) z"),
    ("surprisal_z", "surprisal z"),
)
"""Columns of the tables by stratum and replica."""


def html_report(report: Report) -> str:
    """The whole file."""
    verdict = sentences.headline(report)
    when = f"{sentences.moment(report['began_at'])} to {sentences.moment(report['at'])}"
    noted = "".join(f"<li>{escaped(note)}.</li>" for note in sentences.notes(report))
    parts = [
        f'<h1 class="verdict {_CLASSES[verdict.kind]}">{escaped(verdict.text)}.</h1>',
        f'<p class="lead">Answers of {escaped(sentences.plain(report["model"]))}, {escaped(when)}.</p>',
        f"<ul>{noted}</ul>" if noted else "",
        _findings(report["findings"]),
        _suspect(report["suspect"]),
        _measures(report),
        _plots(report),
        _outcomes(report),
        f"<h2>Tolerance</h2>{card(facts(sentences.tolerance_facts(report['tolerance'])))}",
    ]
    return document(f"Watch of {sentences.plain(report['model'])}", parts)


def _findings(findings: Iterable[Mapping[str, Any]]) -> str:
    cards = [
        card(
            f'<b class="bad">{escaped(group[0]["alarm"])}</b>{facts(sentences.group_facts(group))}'
            f"{_example(group[0]['example'], 'An answer that shows it')}",
            "finding",
        )
        for group in sentences.finding_groups(findings)
    ]
    return f"<h2>Findings</h2>{''.join(cards)}" if cards else ""


def _suspect(suspect: Sequence[Mapping[str, Any]]) -> str:
    if not suspect:
        return ""
    shown = "".join(_example(one, f"{sentences.plain(one['id'])}: {sentences.plain(one['reason'])}") for one in suspect)
    return f"<h2>Answers that are suspect each by itself</h2>{card(shown, 'finding')}"


def _example(example: Mapping[str, Any], title: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{facts(sentences.example_facts(example))}</details>"


def _measures(report: Report) -> str:
    overall = report["all"]
    if not overall["tokens"]:
        return ""
    compared, drawn = (sentences.count(overall[key], "token") for key in ("compared", "drawn"))
    measures = table(("measure", "value", "is", "trainers call it"), sentences.measure_rows(overall), numbers=(1,))
    terms = table(("term", "mean", "z", "tolerated", "is"), sentences.term_rows(report), numbers=(1, 2, 3))
    strata = facts({name: STRATA.get(name, sentences.NOTHING) for name in report["strata"]})
    meanings = f"<details><summary>What the strata are</summary>{strata}</details>"
    parts = [
        f"<h2>Logprobs</h2><p>{compared} with a logprob: g served, t replayed, r = exp(t - g).</p>{card(measures)}",
        f"<h2>Distribution</h2><p>{drawn} drawn, and compared with their distribution.</p>{card(terms)}",
        f"<h2>By stratum</h2>{card(_figures(report['strata']) + meanings)}",
        f"<h2>By replica</h2>{card(_figures(report['replicas']))}",
    ]
    return "".join(parts)


def _figures(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """Measures of each group, one a row."""
    rows = [
        (
            sentences.plain(name),
            sentences.number(figures["tokens"]),
            sentences.number(figures["compared"]),
            *(sentences.measured("z" if key.endswith("_z") else key, figures[key]) for key, _ in _FIGURES),
        )
        for name, figures in groups.items()
    ]
    heads = ("", "tokens", "compared", *(name for _, name in _FIGURES))
    return table(heads, rows, numbers=range(1, len(heads)))


def _plots(report: Report) -> str:
    tolerance = report["tolerance"]
    drawn = [
        _over_time(report["windows"], "tme", "TME", (tolerance["max_tme"],)),
        _over_time(
            report["windows"],
            "surprisal",
            "surprisal minus its mean, nats",
            (-tolerance["distribution"], tolerance["distribution"]),
        ),
    ]
    return f'<h2>By time</h2><div class="plots">{"".join(drawn)}</div>' if any(drawn) else ""


def _over_time(windows: Sequence[Mapping[str, Any]], key: str, name: str, marks: Sequence[float]) -> str:
    points = [(window["from"], window[key]) for window in windows if window[key] is not None]
    if not points:
        return ""
    label = f"{name}: means over {windows[0]['seconds']:g} s; the lines are what is tolerated"
    first, last = (sentences.moment(points[place][0]) for place in (0, -1))
    return plots.timeline(points, label, marks, first, last if len(points) > 1 else "")


def _outcomes(report: Report) -> str:
    rows = sentences.outcome_rows(report)
    parts = [f"<h2>What became of it</h2>{card(table(('', 'result', 'number', ''), rows, numbers=(2,)))}"]
    for title, reasons in (("Unreadable", report["unreadable"]), ("Untested", report["untested"])):
        if reasons:
            rows_of_reasons = table(("reason", "answers"), sentences.reason_rows(reasons), numbers=(1,))
            parts.append(f"<h2>{title}</h2>{card(rows_of_reasons)}")
    return "".join(parts)
