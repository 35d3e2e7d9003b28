"""A referee's report, with the probes of an audit where there are some, as the report that terminal and page show."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from deploy.reports.model import Block, Cell, Document, Kind, ReportSection, ReportTable, Shown, Timeline
from deploy.watch import sentences
from deploy.watch.faults import ADVICE, Finding, by_test, faults, side_of
from deploy.watch.probes.trial import ProbeVerdict
from deploy.watch.sentences import NOTHING, Report, count, measured, moment, number, plain
from serve_app.referee.judge.detectors import meaning_of
from serve_app.referee.judge.strata import STRATA
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.telemetry.metric_names import DISTRIBUTIONS, READ_RESULTS, REPLAY_RESULTS, VERDICTS, WATCHED_RESULTS
from speculative.request import SURPRISAL_CLIP_NATS

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

TERMS = {"probability": "p(y) minus its mean under p", "surprisal": "-log p(y) minus its mean under p, nats"}
"""The terms of the calibration test, whose means are 0 where the tokens y follow the distribution p."""

_ANSWERS = READ_RESULTS | {"judged": "replayed and compared"}
_SHADES: Mapping[str, Kind] = {
    ProbeVerdict.PASSED: "ok",
    ProbeVerdict.FAILED: "bad",
    ProbeVerdict.UNCLEAR: "unclear",
    ProbeVerdict.UNSUPPORTED: "none",
}
_FIGURES = {
    "tokens": "tokens", "tme": "TME", "k3": "k3", "abs_nats": "abs", "max_nats": "max", "probability_z": "p(y) z",
    "surprisal_z": "-log p z",
}  # fmt: skip
"""Columns of the tables by stratum and replica; the JSON has all measures."""
_ERRORS = 4.0  # standard errors that a mean may be off by chance
_MOST_SUSPECT = 5  # shown; the JSON has all


def document(report: Report) -> Document:
    """The whole report."""
    verdict = sentences.headline(report)
    url = f" at {report['audit']['url']}" if "audit" in report else ""
    named = f"{plain(report['model'])}{url}"
    tolerance = Tolerance(**{name: value for name, value in report["tolerance"].items() if name != "format"})
    suspect = report["suspect"][-_MOST_SUSPECT:]
    of_all = f", the latest {len(suspect)} of {len(report['suspect'])}" if len(suspect) < len(report["suspect"]) else ""
    return Document(
        f"{'Audit' if url else 'Watch'} of {plain(report['model'])}",
        Cell(f"{verdict.text}.", verdict.kind),
        f"Answers of {named}, {moment(report['began_at'])} to {moment(report['at'])}.",
        [f"{note}." for note in sentences.notes(report)],
        [
            ReportSection("Probes", _probes(report)),
            ReportSection("Findings", [_fault(fault) for fault in faults(report["findings"])]),
            ReportSection("Verdicts on answers by themselves", _verdicts(report["answers"]["verdicts"])),
            *_measures(report),
            ReportSection(f"Answers that are suspect by themselves{of_all}", [_example(one) for one in suspect]),
            ReportSection("What became of it", _outcomes(report)),
            ReportSection("Tolerance", [{plain(name): plain(value) for name, value in tolerance.facts().items()}]),
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


def _fault(findings: Sequence[Finding]) -> Shown:
    """One cause, with each test that it made fire."""
    first, tests = findings[0], by_test(findings)
    facts = {name: _in_words(own) for name, own in tests.items()} | {
        "replica": plain(", ".join(sorted({one["replica"] for one in findings}))),
        "found": f"after {count(first['answers'], 'answer')}, by one of {moment(first['at'])}; the evidence begins "
        f"{moment(min(one['evidence_since'] for one in findings))}",
        "what to do": ADVICE[next(iter(tests))],
    }
    sides = dict.fromkeys(filter(None, map(side_of, tests.values())))
    title = ", ".join(tests) + (f" ({', '.join(sides)})" if sides else "")
    return Shown(title, facts, "an answer that shows it", _example(first["example"]))


def _in_words(findings: Sequence[Finding]) -> str:
    """Return what one test found, and among which tokens."""
    first = next((one for one in findings if one["stratum"] == "all"), findings[0])
    times = _times(sum(one["num"] for one in findings if one["stratum"] == first["stratum"]))
    others = dict.fromkeys(plain(one["stratum"]) for one in findings if one["stratum"] != first["stratum"])
    also = f"; also among {', '.join(others)}" if others else ""
    found = f"{meaning_of(first['alarm'], side_of(findings))}; among {plain(first['stratum'])} after "
    return f"{found}{count(first['tokens'], 'token')}, {times}{also}"


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
    overall = report["all"]
    if not overall["tokens"]:
        return []
    tolerated = {name: partial(_tolerated, name, report) for name in ("tme", *TERMS)}
    title = f"{count(overall['compared'], 'token')} with a logprob: g served, t replayed, r = exp(t - g)"
    rows = [(name, measured(key, overall[key]), what, theirs) for key, (name, what, theirs) in MEASURES.items()]
    measures = ReportTable(title, ("measure", "value", "is", "trainers call it"), rows, (1,))
    terms = [
        (
            name,
            measured(name, overall[name]),
            measured(f"{name}_z", overall[f"{name}_z"]),
            f"± {tolerated[name](overall):.2g}" if overall["drawn"] else NOTHING,
            what,
        )
        for name, what in TERMS.items()
    ]
    title = f"{count(overall['drawn'], 'token')} against the distribution"
    drawn = ReportTable(title, ("term", "mean", "z", "tolerated", "is"), terms, (1, 2, 3))
    lines = [
        _over_time(report["windows"], "tme", "TME", 1.0, tolerated["tme"]),
        _over_time(report["windows"], "surprisal", "surprisal minus its mean, nats", 0.0, tolerated["surprisal"]),
    ]
    alarmed = {one["stratum"] for one in report["findings"]}, {one["replica"] for one in report["findings"]}
    return [
        ReportSection("By time", [line for line in lines if line is not None]),
        ReportSection("By stratum", [_by_group(report["strata"], alarmed[0])]),
        ReportSection("By replica", [_by_group(report["replicas"], alarmed[1])]),
        ReportSection("Logprobs and distribution", [measures, drawn]),
    ]


def _tolerated(name: str, report: Report, figures: Mapping[str, Any]) -> float:
    """Return how far a mean over so many tokens may be from where it would be without rounding: by rounding, and by
    chance. Chance goes by the spread of these tokens or of all, whichever is larger: few tokens show too little."""
    overall, tolerance, key = report["all"], report["tolerance"], "compared" if name == "tme" else "drawn"
    shift = tolerance["distribution"] * (SURPRISAL_CLIP_NATS if name == "surprisal" else 1.0)
    usual = overall[f"{name}_error"] * math.sqrt(overall[key] / figures[key])
    by_chance = _ERRORS * max(figures[f"{name}_error"], usual)
    return float(by_chance + (tolerance["max_tme"] - 1 if name == "tme" else shift))


def _by_group(groups: Mapping[str, Mapping[str, Any]], alarmed: Collection[str]) -> ReportTable:
    """Figures of each group, one a row; those with an alarm are marked."""
    rows: list[Sequence[str | Cell]] = [
        (
            Cell(plain(group), "bad" if group in alarmed else "", STRATA.get(group, "")),
            number(of["tokens"]),
            *(measured(key, of[key]) for key in list(_FIGURES)[1:]),
        )
        for group, of in groups.items()
    ]
    return ReportTable("", ("", *_FIGURES.values()), rows, range(1, 1 + len(_FIGURES)))


def _over_time(
    windows: Sequence[Mapping[str, Any]], key: str, name: str, ideal: float, tolerated: Callable[[Any], float]
) -> Timeline | None:
    shown = [window for window in windows if window[key] is not None]
    if not shown or not shown[-1]["from"]:  # records without times
        return None
    label = f"{name}: means over {shown[0]['seconds']:g} s; the band is what rounding and chance explain of such means"
    points = [(window["from"], window[key]) for window in shown]
    around = [tolerated(window) for window in shown]
    band = [(ideal - (0.0 if key == "tme" else one), ideal + one) for one in around]
    first, last = (moment(points[place][0]) for place in (0, -1))
    return Timeline(label, points, band, first, last if len(points) > 1 else "")


def _verdicts(counts: Mapping[str, float]) -> list[Block]:
    shades: Mapping[str, Kind] = {"verified": "ok", "suspect": "bad"}
    rows = [(Cell(name, shades.get(name, "")), number(num), VERDICTS[name]) for name, num in counts.items() if num]
    return [ReportTable("", ("verdict", "answers", "is"), rows, (1,))] if rows else []


def _outcomes(report: Report) -> list[Block]:
    """Return what became of requests, answers and replays, and why some could not be read or tested."""
    answers = report["answers"]
    groups: list[tuple[str, Mapping[str, float], Mapping[str, str]]] = [
        ("requests", report["requests"], WATCHED_RESULTS),
        ("answers", {name: answers.get(name, 0) for name in _ANSWERS}, _ANSWERS),
        ("replays", answers["replays"], REPLAY_RESULTS),
        ("distributions", answers["distributions"], DISTRIBUTIONS),
    ]
    rows = [
        (group, plain(name), number(num), meanings.get(name, ""))
        for group, results, meanings in groups
        for name, num in results.items()
        if num
    ]
    tables: list[Block] = [ReportTable("", ("", "result", "number", ""), rows, (2,))] if rows else []
    for title, reasons in (("Unreadable", report["unreadable"]), ("Untested", report["untested"])):
        if reasons:
            shown = [(plain(why), number(num)) for why, num in reasons.items()]
            tables.append(ReportTable(title, ("reason", "answers"), shown, (1,)))
    return tables


def _times(num: int) -> str:
    return "once" if num == 1 else f"{number(num)} times"
