"""A referee's report as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.reports import plots
from deploy.reports.html_pages import card, document, escaped, example, facts, figures, findings, table
from deploy.watch import sentences
from deploy.watch.sentences import Report
from serve_app.referee.strata import STRATA

_FIGURES = {
    "tokens": "tokens",
    "compared": "compared",
    **{key: name for key, (name, _, _) in sentences.MEASURES.items()},
    "probability_z": "p(y) z",
    "surprisal_z": "surprisal z",
}
"""Columns of the tables by stratum and replica."""


def html_report(report: Report) -> str:
    """The whole file."""
    verdict = sentences.headline(report)
    when = f"{sentences.moment(report['began_at'])} to {sentences.moment(report['at'])}"
    noted = "".join(f"<li>{escaped(note)}.</li>" for note in sentences.notes(report))
    parts = [
        f'<h1 class="verdict {sentences.KINDS[verdict.kind]}">{escaped(verdict.text)}.</h1>',
        f'<p class="lead">Answers of {escaped(sentences.plain(report["model"]))}, {escaped(when)}.</p>',
        f"<ul>{noted}</ul>" if noted else "",
        findings(map(sentences.shown, sentences.finding_groups(report["findings"]))),
        _suspect(report["suspect"]),
        _measures(report),
        figures("By time", _plots(report)),
        *(f"<h2>{escaped(one.title)}</h2>{card(table(one))}" for one in sentences.outcomes(report)),
        f"<h2>Tolerance</h2>{card(facts(sentences.tolerance_facts(report['tolerance'])))}",
    ]
    return document(f"Watch of {sentences.plain(report['model'])}", parts)


def _suspect(suspect: Sequence[Mapping[str, Any]]) -> str:
    if not suspect:
        return ""
    shown = [
        example(f"{sentences.plain(one['id'])}: {sentences.plain(one['reason'])}", sentences.example_facts(one))
        for one in suspect
    ]
    return f"<h2>Answers that are suspect by themselves</h2>{card(''.join(shown), 'finding')}"


def _measures(report: Report) -> str:
    overall = report["all"]
    if not overall["tokens"]:
        return ""
    compared, drawn = (sentences.count(overall[key], "token") for key in ("compared", "drawn"))
    measures, terms = table(sentences.measures(overall)), table(sentences.terms(report))
    strata = facts({name: STRATA.get(name, sentences.NOTHING) for name in report["strata"]})
    meanings = f"<details><summary>What the strata are</summary>{strata}</details>"
    parts = [
        f"<h2>Logprobs</h2><p>{compared} with a logprob: g served, t replayed, r = exp(t - g).</p>{card(measures)}",
        f"<h2>Distribution</h2><p>{drawn} drawn, and compared with their distribution.</p>{card(terms)}",
        f"<h2>By stratum</h2>{card(table(sentences.by_group('', report['strata'], _FIGURES)) + meanings)}",
        f"<h2>By replica</h2>{card(table(sentences.by_group('', report['replicas'], _FIGURES)))}",
    ]
    return "".join(parts)


def _plots(report: Report) -> tuple[str, str]:
    windows, tolerance = report["windows"], report["tolerance"]
    shift = tolerance["distribution"]
    return (
        _over_time(windows, "tme", "TME", (tolerance["max_tme"],)),
        _over_time(windows, "surprisal", "surprisal minus its mean, nats", (-shift, shift)),
    )


def _over_time(windows: Sequence[Mapping[str, Any]], key: str, name: str, marks: Sequence[float]) -> str:
    points = [(window["from"], window[key]) for window in windows if window[key] is not None]
    if not points:
        return ""
    label = f"{name}: means over {windows[0]['seconds']:g} s; the lines are what is tolerated"
    first, last = (sentences.moment(points[place][0]) for place in (0, -1))
    return plots.timeline(points, label, marks, first, last if len(points) > 1 else "")
