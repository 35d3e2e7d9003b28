"""A referee's report in sentences and rows: the terminal and the page show these."""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deploy.reports.model import Kind as Shade
from deploy.reports.model import ReportTable, Shown
from serve_app.referee.strata import STRATA
from serve_app.telemetry.metric_names import REPLAY_ALARMS, WATCHED_RESULTS

Report = Mapping[str, Any]
"""Return value of `Referee.report`."""

Kind = Literal["alarm", "suspect", "nothing", "clean"]
KINDS: Mapping[Kind, Shade] = {"alarm": "bad", "suspect": "bad", "nothing": "unclear", "clean": "ok"}
"""Shade in which each is shown."""

NOTHING = "–"
_NUMBERS = ("tokens", "compared")
_LONGEST = 300  # characters of what a server says
_LAGGING = "the referee lagged behind"

_ALARMS = {
    "drift": "the served logprobs are not those of the model",
    "probability": "the tokens do not follow the distribution",
    "surprisal": "the tokens do not follow the distribution",
    "unlikely": "the tokens do not follow the distribution",
    "support": "tokens were emitted that the requests' rules or filters exclude",
    "greedy": "tokens at temperature 0 are not the likeliest ones",
    "impossible": "answers came that the model cannot have produced",
    "draws": "tokens are not those that the requests' seeds demand",
    "alternatives": "the logprobs reported of other tokens are not their own",
}
"""Words of a headline for each alarm."""

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

REPLAYS = {
    "ok": "computed and compared",
    "failed": "not computed in two attempts",
    "skipped": f"not tried: {_LAGGING}",
    "outdated": "not comparable: the weights have been changed since",
    "refused": "not computed: the model cannot have produced the answer",
}
_DISTRIBUTIONS = {
    "tested": "sampled answers whose tokens were compared with their distribution",
    "greedy": "answers at temperature 0, whose tokens were compared with the likeliest",
    "repeated_seed": "answers with a seed seen before, which add no evidence",
    "untested": "answers whose distribution could not be computed",
}


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict, as one sentence without its full stop."""

    kind: Kind
    text: str


def headline(report: Report) -> Headline:
    """Return what was found, in one sentence."""
    answers, overall = report["answers"], report["all"]
    if report["findings"]:
        return Headline("alarm", _alarm_sentence(report["findings"]))
    if nothing_compared(report):
        return Headline("nothing", f"Nothing could be compared: {_why_nothing(report)}")
    seen = f"{count(overall['tokens'], 'token')} of {count(answers['judged'], 'answer')}"
    if num := _num_suspect(report):
        return Headline("suspect", f"No alarm in {seen}, but {_suspects(num)}")
    return Headline("clean", f"No alarm in {seen}")


def _alarm_sentence(findings: Iterable[Mapping[str, Any]]) -> str:
    """Describe the first finding; if its stratum is one of several that show it, that of all tokens."""
    found = list(findings)
    first = next((one for one in found if (one["alarm"], one["stratum"]) == (found[0]["alarm"], "all")), found[0])
    where = "" if first["stratum"] == "all" else f" of the stratum {first['stratum']}"
    others = sorted({one["alarm"] for one in found} - {first["alarm"]})
    also = f"; also found: {', '.join(others)}" if others else ""
    says = _ALARMS.get(first["alarm"], first["alarm"])
    return f"An alarm: {says} ({first['alarm']}), after {count(first['tokens'], 'token')}{where}{also}"


def nothing_compared(report: Report) -> bool:
    """Return whether neither a logprob nor a distribution was compared."""
    distributions = report["answers"]["distributions"]
    looked_at = sum(distributions.get(name, 0) for name in ("tested", "greedy", "repeated_seed"))
    return not report["all"]["compared"] and not looked_at


def _why_nothing(report: Report) -> str:
    answers = report["answers"]
    read, unreadable = int(answers.get("read", 0)), int(answers.get("unreadable", 0))
    if answers["judged"]:
        reasons = f" ({commonest(report['untested'])})" if report["untested"] else ""
        return f"{count(answers['judged'], 'answer')} had no logprobs and no distribution to test{reasons}"
    if read:
        results = ", ".join(f"{number(num)} {name}" for name, num in answers["replays"].items() if num)
        return f"of {count(read, 'answer')} none has been replayed ({results or 'they wait'})"
    if unreadable:
        return f"of {count(unreadable, 'answer')} none could be read ({commonest(report['unreadable'])})"
    results = ", ".join(f"{number(num)} {name}" for name, num in report["requests"].items() if num)
    return f"no answer reached the referee (requests: {results or 'none'})"


def _num_suspect(report: Report) -> int:
    return int(max(report["answers"]["verdicts"].get("suspect", 0), len(report["suspect"])))


def shortcomings(report: Report) -> dict[str, str]:
    """Return what keeps the report from being clean and whole, by the names of `--fail-on`; only those that apply."""
    found: dict[str, str] = {}
    answers, requests = report["answers"], report["requests"]
    if report["findings"]:
        found["alarm"] = headline(report).text
    if num := _num_suspect(report):
        found["suspect"] = _suspects(num)
    read, unreadable = int(answers.get("read", 0)), int(answers.get("unreadable", 0))
    if nothing_compared(report):
        found["unread"] = f"Nothing could be compared: {_why_nothing(report)}"
    elif unreadable > read:
        found["unread"] = f"{count(unreadable, 'answer')} could not be read, and only {number(read)} could"
    distributions = answers["distributions"]
    if not distributions.get("tested", 0) + distributions.get("greedy", 0):
        reasons = f": {commonest(report['untested'])}" if report["untested"] else ""
        found["untested"] = f"The distribution of no answer was tested{reasons}"
    dropped = int(requests.get("dropped", 0) + requests.get("failed", 0))
    skipped = int(answers["replays"].get("skipped", 0))
    if dropped + skipped:
        left_out = [count(num, what) for num, what in ((dropped, "exchange"), (skipped, "answer")) if num]
        found["dropped"] = f"Left out, because {_LAGGING}: {' and '.join(left_out)}"
    return found


def notes(report: Report) -> list[str]:
    """Return what a reader of the headline must know besides, as sentences without their full stop."""
    answers = report["answers"]
    unreadable, failed = int(answers.get("unreadable", 0)), int(answers["replays"].get("failed", 0))
    found = {key: text for key, text in shortcomings(report).items() if key in ("untested", "dropped")}
    said = [] if headline(report).kind == "nothing" else list(found.values())
    if answers["judged"] and not report["all"]["compared"]:
        said.append("No logprob was compared: the answers came without")
    if unreadable:
        said.append(f"{count(unreadable, 'answer')} could not be read")
    if failed:
        said.append(f"The replay of {count(failed, 'answer')} failed: the referee's log says why")
    return said


def finding_groups(findings: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Findings of one alarm that the same answer brought up, in several strata, together."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in findings:
        groups.setdefault((one["alarm"], one["replica"], one["example"]["id"]), []).append(one)
    return list(groups.values())


def shown(group: Sequence[Mapping[str, Any]]) -> Shown:
    """Such findings, with the answer that shows them."""
    example = example_facts(group[0]["example"])
    return Shown(group[0]["alarm"], group_facts(group), "An answer that shows it", example)


def group_facts(group: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what is known of such findings, by name; strata are names, too."""
    first = group[0]
    return {
        "means": REPLAY_ALARMS.get(first["alarm"], NOTHING),
        "replica": plain(first["replica"]),
        "found": f"after {count(first['answers'], 'answer')}, by one of {moment(first['at'])}; the evidence begins "
        f"{moment(min(one['evidence_since'] for one in group))}",
    } | {
        plain(one["stratum"]): f"{STRATA.get(one['stratum'], NOTHING)}: after {count(one['tokens'], 'token')}, "
        f"seen {_times(one['num'])}"
        for one in group
    }


def example_facts(example: Mapping[str, Any]) -> dict[str, str]:
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
    said = [
        f"{name} {token[key]:.3g} nats"
        for key, name in (
            ("drift_nats", "drift"),
            ("surprisal_nats", "surprisal"),
            ("below_likeliest_nats", "below the likeliest by"),
        )
        if token[key] is not None
    ]
    return f"token {token['index']} (id {token['token_id']}): {', '.join(said) or NOTHING}"


def measures(figures: Mapping[str, Any]) -> ReportTable:
    """The trainers' measures."""
    title = f"{count(figures['compared'], 'token')} with a logprob: g served, t replayed, r = exp(t - g)"
    rows = [(name, measured(key, figures[key]), what, theirs) for key, (name, what, theirs) in MEASURES.items()]
    return _table(title, ("measure", "value", "is", "trainers call it"), rows, (1,))


def terms(report: Report) -> ReportTable:
    """The calibration test's terms."""
    overall, tolerated = report["all"], report["tolerance"]["distribution"]
    rows = [
        (name, measured(name, overall[name]), measured(f"{name}_z", overall[f"{name}_z"]), f"± {tolerated:g}", what)
        for name, what in TERMS.items()
    ]
    title = f"{count(overall['drawn'], 'token')} against the distribution"
    return _table(title, ("term", "mean", "z", "tolerated", "is"), rows, (1, 2, 3))


def by_group(title: str, groups: Mapping[str, Mapping[str, Any]], figures: Mapping[str, str]) -> ReportTable:
    """Figures of each group, one a row; figures: their names, by key. `tokens` and `compared` are numbers."""
    rows = [
        (plain(name), *(number(of[key]) if key in _NUMBERS else measured(key, of[key]) for key in figures))
        for name, of in groups.items()
    ]
    return _table(title, ("", *figures.values()), rows, range(1, 1 + len(figures)))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int]) -> ReportTable:
    return ReportTable(title, columns, rows, numbers, whole=numbers)


def tolerance_facts(tolerance: Mapping[str, Any]) -> dict[str, str]:
    """Return what is no fault, by name."""
    measured_values = plain(json.dumps(tolerance["measured"])) if tolerance["measured"] else ""
    return {
        "from": plain(tolerance["source"]),
        "TME": f"at most {tolerance['max_tme']:g}",
        "logits": f"shifted by at most {tolerance['edge_nats']:g} nats",
        "distribution": f"means of the terms at most {tolerance['distribution']:g} from 0",
        **({"measured": measured_values} if measured_values else {}),
    }


def outcomes(report: Report) -> list[ReportTable]:
    """Return what became of requests, answers and replays, and why some could not be read or tested."""
    answers = report["answers"]
    groups: list[tuple[str, Mapping[str, float], Mapping[str, str]]] = [
        ("requests", report["requests"], WATCHED_RESULTS),
        ("answers", {name: answers.get(name, 0) for name in ("read", "unreadable", "judged")}, _ANSWERS),
        ("replays", answers["replays"], REPLAYS),
        ("distributions", answers["distributions"], _DISTRIBUTIONS),
        ("verdicts", answers["verdicts"], {}),
    ]
    rows = [
        (group, plain(name), number(num), meanings.get(name, ""))
        for group, results, meanings in groups
        for name, num in results.items()
        if num or group == "answers"
    ]
    return [
        _table("What became of it", ("", "result", "number", ""), rows, (2,)),
        *(
            _table(title, ("reason", "answers"), [(plain(why), number(num)) for why, num in reasons.items()], (1,))
            for title, reasons in (("Unreadable", report["unreadable"]), ("Untested", report["untested"]))
            if reasons
        ),
    ]


_ANSWERS = {
    "read": "with all that a replay needs",
    "unreadable": "cannot be computed again; the reasons are below",
    "judged": "replayed and compared",
}


def commonest(reasons: Mapping[str, int]) -> str:
    """The most frequent reason, and how many others there are."""
    first = plain(next(iter(reasons), NOTHING))
    return first if len(reasons) < 2 else f"{first}; and {count(len(reasons) - 1, 'other reason')}"


def measured(name: str, value: float | None) -> str:
    """A measure as text."""
    if value is None:
        return NOTHING
    value += 0.0  # no -0
    if name in ("ratio_over_2", "ratio_under_half"):
        return f"{value:.3%}"
    if name in ("tme", "mean_ratio", "ess"):
        return f"{value:.4f}"
    return f"{value:.1f}" if name.endswith("_z") else f"{value:.3g}"


def count(num: float, what: str) -> str:
    """`1 token`, `1,312 tokens`."""
    return f"{number(num)} {what}{'' if num == 1 else 's'}"


def number(num: float) -> str:
    """With separators of thousands."""
    return f"{int(num):,}"


def moment(at: float) -> str:
    """Unix seconds as date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    except (OverflowError, ValueError, OSError):  # no time of a clock
        return f"{at:g} s"


def plain(text: object) -> str:
    """Return what a server said, without characters that a terminal obeys or that cannot be seen, and not too long."""
    said = str(text)
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in said)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{number(num)} times"


def _suspects(num: int) -> str:
    return "1 answer is suspect by itself" if num == 1 else f"{number(num)} answers are suspect, each by itself"
