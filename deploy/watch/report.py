"""A referee's report, with the probes of an audit where there are some, as the report that terminal and page show."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deploy.reports.model import Block, Cell, Document, Kind, ReportSection, ReportTable, Shown, Timeline
from deploy.watch import sentences
from deploy.watch.probes.trial import ProbeVerdict
from deploy.watch.sentences import NOTHING, Report, count, measured, moment, number, plain
from serve_app.referee.strata import STRATA
from serve_app.telemetry.metric_names import (
    DISTRIBUTIONS,
    READ_RESULTS,
    REPLAY_ALARMS,
    REPLAY_RESULTS,
    VERDICTS,
    WATCHED_RESULTS,
)

MEASURES = {
    "tme": ("TME", "mean exp|g - t|", "NeMo-RL token_mult_prob_error"),
    "k1": ("k1", "mean (g - t), nats", "verl rollout_corr/kl, slime k1"),
    "k3": ("k3", "mean (r - log r - 1), nats", "verl rollout_corr/k3_kl, NeMo-RL gen_kl_error, slime k3"),
    "mean_ratio": ("mean ratio", "mean r", "NeMo-RL sampling_importance_ratio, verl rollout_is_mean"),
    "abs_nats": ("abs", "mean |g - t|, nats", "slime train_rollout_logprob_abs_diff"),
    "max_nats": ("max", "largest |g - t|, nats", ""),
    "chi2": ("chi2", "mean r² - 1", "verl rollout_corr/chi2_token"),
    "ess": ("ESS", "(sum r)² / (n sum r²)", "verl rollout_is_eff_sample_size"),
    "ratio_over_2": ("r > 2", "share of tokens", "verl rollout_is_ratio_fraction_high"),
    "ratio_under_half": ("r < 1/2", "share of tokens", "verl rollout_is_ratio_fraction_low"),
}
"""Measures: the name here, the meaning (g served, t replayed, r = exp(t - g)), and its name with trainers."""

TERMS = {
    "probability": "p(y) minus its mean under p",
    "surprisal": "-log p(y) minus its mean under p, nats",
}
"""The terms of the calibration test, whose means are 0 where the tokens y follow the distribution p."""

_ANSWERS = READ_RESULTS | {"judged": "replayed and compared"}
_SHADES: Mapping[str, Kind] = {
    ProbeVerdict.PASSED: "ok",
    ProbeVerdict.FAILED: "bad",
    ProbeVerdict.UNCLEAR: "unclear",
    ProbeVerdict.UNSUPPORTED: "none",
}
_FIGURES = {
    "tokens": "tokens",
    "tme": "TME",
    "k3": "k3",
    "abs_nats": "abs",
    "max_nats": "max",
    "probability_z": "p(y) z",
    "surprisal_z": "-log p z",
}
"""Columns of the tables by stratum and replica; a page has all measures as well."""
_MOST_SUSPECT = 5  # shown; the JSON has all


def document(report: Report) -> Document:
    """The whole report."""
    verdict = sentences.headline(report)
    url = f" at {report['audit']['url']}" if "audit" in report else ""
    named = f"{plain(report['model'])}{url}"
    suspect = report["suspect"][-_MOST_SUSPECT:]
    of_all = f", the latest {len(suspect)} of {len(report['suspect'])}" if len(suspect) < len(report["suspect"]) else ""
    return Document(
        f"{'Audit' if url else 'Watch'} of {plain(report['model'])}",
        Cell(f"{verdict.text}.", sentences.KINDS[verdict.kind]),
        f"Answers of {named}, {moment(report['began_at'])} to {moment(report['at'])}.",
        [f"{note}." for note in sentences.notes(report)],
        [
            ReportSection("Probes", _probes(report)),
            ReportSection("Findings", [_finding(group) for group in _grouped(report["findings"])]),
            ReportSection(f"Answers that are suspect by themselves{of_all}", [_example(one) for one in suspect]),
            *_measures(report),
            ReportSection("What became of it", _outcomes(report)),
            ReportSection("Tolerance", [_tolerance(report["tolerance"])]),
        ],
    )


def _probes(report: Report) -> list[Block]:
    probes = report["audit"]["probes"] if "audit" in report else []
    if not probes:
        return []
    rows = [
        (
            Cell(one["probe"], detail=one["asks"]),
            Cell(one["verdict"], _SHADES[one["verdict"]]),
            plain(one["seen"]),
            number(one["requests"]),
        )
        for one in probes
    ]
    found = [
        Shown(
            found["expected"],
            {"observed": plain(found["observed"]), "seen": _times(found["count"])},
            "the first request that showed it",
            {name: plain(json.dumps(value)) for name, value in found["request"].items()},
            where=one["probe"],
        )
        for one in probes
        for found in one["findings"]
    ]
    return [ReportTable("", ("probe", "verdict", "what was seen", "requests"), rows, (3,)), *found]


def _grouped(findings: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Findings of one alarm that the same answer brought up, in several strata, together."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in findings:
        groups.setdefault((one["alarm"], one["replica"], one["example"]["id"]), []).append(one)
    return list(groups.values())


def _finding(group: Sequence[Mapping[str, Any]]) -> Shown:
    first = group[0]
    facts = {
        "means": REPLAY_ALARMS.get(first["alarm"], NOTHING),
        "replica": plain(first["replica"]),
        "found": f"after {count(first['answers'], 'answer')}, by one of {moment(first['at'])}; the evidence begins "
        f"{moment(min(one['evidence_since'] for one in group))}",
    }
    strata = {
        plain(one["stratum"]): f"{STRATA.get(one['stratum'], NOTHING)}: after {count(one['tokens'], 'token')}, "
        f"seen {_times(one['num'])}"
        for one in group
    }
    return Shown(first["alarm"], facts | strata, "an answer that shows it", _example(first["example"]))


def _example(example: Mapping[str, Any]) -> dict[str, str]:
    """Return what is known of an answer that shows something, by name."""
    shown = {
        "answer": plain(example["id"]),
        "replica": plain(example["replica"]),
        "at": moment(example["at"]),
        "verdict": plain(example["reason"]),
        "length": f"{count(example['tokens'], 'token')} after {number(example['prompt_tokens'])} of the prompt",
        "parameters": plain(", ".join(f"{name} {value}" for name, value in example["params"].items())) or "defaults",
        "worst tokens": "; ".join(map(_worst_token, example["worst"])) or NOTHING,
    }
    kept = {name: json.dumps(list(example[name])) for name in ("prompt_token_ids", "token_ids") if name in example}
    return shown | {name.replace("_", " "): ids for name, ids in kept.items()}


def _worst_token(token: Mapping[str, Any]) -> str:
    names = {"drift_nats": "drift", "surprisal_nats": "surprisal", "below_likeliest_nats": "below the likeliest by"}
    said = [f"{name} {token[key]:.3g} nats" for key, name in names.items() if token[key] is not None]
    return f"token {token['index']} (id {token['token_id']}): {', '.join(said) or NOTHING}"


def _measures(report: Report) -> list[ReportSection]:
    overall, tolerance = report["all"], report["tolerance"]
    if not overall["tokens"]:
        return []
    title = f"{count(overall['compared'], 'token')} with a logprob: g served, t replayed, r = exp(t - g)"
    rows = [(name, measured(key, overall[key]), what, theirs) for key, (name, what, theirs) in MEASURES.items()]
    measures = _table(title, ("measure", "value", "is", "trainers call it"), rows, (1,))
    shift = tolerance["distribution"]
    terms = [
        (name, measured(name, overall[name]), measured(f"{name}_z", overall[f"{name}_z"]), f"± {shift:g}", what)
        for name, what in TERMS.items()
    ]
    title = f"{count(overall['drawn'], 'token')} against the distribution"
    drawn = _table(title, ("term", "mean", "z", "tolerated", "is"), terms, (1, 2, 3))
    lines = [
        _over_time(report["windows"], "tme", "TME", (tolerance["max_tme"],)),
        _over_time(report["windows"], "surprisal", "surprisal minus its mean, nats", (-shift, shift)),
    ]
    return [
        ReportSection("Logprobs and distribution", [measures, drawn]),
        ReportSection("By stratum", [_by_group(report["strata"])]),
        ReportSection("By replica", [_by_group(report["replicas"])]),
        ReportSection("By time", [line for line in lines if line is not None]),
    ]


def _by_group(groups: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """Figures of each group, one a row."""
    more = {key: name for key, (name, _, _) in MEASURES.items() if key not in _FIGURES}
    names = {**_FIGURES, "compared": "compared", **more}
    rows: list[Sequence[str | Cell]] = [
        (
            Cell(plain(group), detail=STRATA.get(group, "")),
            *(number(of[key]) if key in ("tokens", "compared") else measured(key, of[key]) for key in names),
        )
        for group, of in groups.items()
    ]
    columns = range(1, 1 + len(names))
    return ReportTable("", ("", *names.values()), rows, columns, columns, optional=columns[len(_FIGURES) :])


def _over_time(windows: Sequence[Mapping[str, Any]], key: str, name: str, marks: Sequence[float]) -> Timeline | None:
    points = [(window["from"], window[key]) for window in windows if window[key] is not None]
    if not points:
        return None
    label = f"{name}: means over {windows[0]['seconds']:g} s; the lines are what is tolerated"
    first, last = (moment(points[place][0]) for place in (0, -1))
    return Timeline(label, points, marks, first, last if len(points) > 1 else "")


def _outcomes(report: Report) -> list[Block]:
    """Return what became of requests, answers and replays, and why some could not be read or tested."""
    answers = report["answers"]
    groups: list[tuple[str, Mapping[str, float], Mapping[str, str]]] = [
        ("requests", report["requests"], WATCHED_RESULTS),
        ("answers", {name: answers.get(name, 0) for name in _ANSWERS}, _ANSWERS),
        ("replays", answers["replays"], REPLAY_RESULTS),
        ("distributions", answers["distributions"], DISTRIBUTIONS),
        ("verdicts", answers["verdicts"], VERDICTS),
    ]
    rows = [
        (group, plain(name), number(num), meanings.get(name, ""))
        for group, results, meanings in groups
        for name, num in results.items()
        if num or group == "answers"
    ]
    tables: list[Block] = [_table("", ("", "result", "number", ""), rows, (2,))]
    for title, reasons in (("Unreadable", report["unreadable"]), ("Untested", report["untested"])):
        if reasons:
            shown = [(plain(why), number(num)) for why, num in reasons.items()]
            tables.append(_table(title, ("reason", "answers"), shown, (1,)))
    return tables


def _tolerance(tolerance: Mapping[str, Any]) -> dict[str, str]:
    """Return what is no fault, by name."""
    facts = {
        "from": plain(tolerance["source"]),
        "TME": f"at most {tolerance['max_tme']:g}",
        "logits": f"shifted by at most {tolerance['edge_nats']:g} nats",
        "distribution": f"means of the terms at most {tolerance['distribution']:g} from 0",
    }
    return facts | ({"measured": plain(json.dumps(tolerance["measured"]))} if tolerance["measured"] else {})


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int]) -> ReportTable:
    return ReportTable(title, columns, rows, numbers, whole=numbers)


def _times(num: int) -> str:
    return "once" if num == 1 else f"{number(num)} times"
