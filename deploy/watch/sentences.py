"""The verdict of a referee's report in sentences, and its texts and numbers as they are shown."""

import time
from collections.abc import Mapping
from typing import Any

from deploy.reports.model import Cell
from serve_app.referee.judge.detectors import meaning_of
from serve_app.telemetry.logs import printable

Report = Mapping[str, Any]
"""Return value of `Referee.report`."""

NOTHING = "–"
_LONGEST = 300  # characters of what a server says


def headline(report: Report) -> Cell:
    """Return what was found, in one sentence without its full stop; unclear = nothing could be compared."""
    found, answers = shortcomings(report), report["answers"]
    if wrong := [found[name] for name in ("alarm", "probes") if name in found]:
        return Cell(". ".join(wrong), "bad")
    if _nothing_compared(report):
        return Cell(found["unread"], "unclear")
    seen = f"{count(report['all']['tokens'], 'token')} of {count(answers['judged'], 'answer')}"
    if "suspect" in found:
        return Cell(f"No alarm in {seen}, but {found['suspect']}", "bad")
    return Cell(f"No alarm in {seen}", "ok")


def _nothing_compared(report: Report) -> bool:
    """Return whether neither a logprob nor a distribution was compared."""
    distributions = report["answers"]["distributions"]
    looked_at = sum(distributions.get(name, 0) for name in ("tested", "greedy", "chosen_seed"))
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


def shortcomings(report: Report) -> dict[str, str]:
    """Return what keeps the report from being clean and whole, by the names of `--fail-on`; only those that apply."""
    found: dict[str, str] = {}
    answers, requests = report["answers"], report["requests"]
    if report["findings"]:
        # The first finding; where several strata show it, the one of all tokens.
        alarms = report["findings"]
        first = next(
            (one for one in alarms if (one["alarm"], one["stratum"]) == (alarms[0]["alarm"], "all")), alarms[0]
        )
        where = "" if first["stratum"] == "all" else f" of the stratum {first['stratum']}"
        others = sorted({one["alarm"] for one in alarms} - {first["alarm"]})
        also = f"; also found: {', '.join(others)}" if others else ""
        says = meaning_of(first["alarm"], first["side"])
        found["alarm"] = f"An alarm: {says} ({first['alarm']}), after {count(first['tokens'], 'token')}{where}{also}"
    if failed := [one["probe"] for one in report.get("audit", {}).get("probes", ()) if one["findings"]]:
        found["probes"] = f"{count(len(failed), 'probe')} failed: {', '.join(failed)}"
    if num := int(max(answers["verdicts"].get("suspect", 0), len(report["suspect"]))):
        many = f"{number(num)} answers are suspect, each by itself"
        found["suspect"] = "1 answer is suspect by itself" if num == 1 else many
    read, unreadable = int(answers.get("read", 0)), int(answers.get("unreadable", 0))
    if _nothing_compared(report):
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
        found["dropped"] = f"Left out, because the referee lagged behind: {' and '.join(left_out)}"
    return found


def notes(report: Report) -> list[str]:
    """Return what a reader of the headline must know besides, as sentences without their full stop."""
    answers = report["answers"]
    unreadable, failed = int(answers.get("unreadable", 0)), int(answers["replays"].get("failed", 0))
    found = {key: text for key, text in shortcomings(report).items() if key in ("untested", "dropped")}
    said = [] if headline(report).kind == "unclear" else list(found.values())
    if answers["judged"] and not report["all"]["compared"]:
        said.append("No logprob was compared: the answers came without")
    if unreadable:
        said.append(f"{count(unreadable, 'answer')} could not be read")
    if failed:
        said.append(f"The replay of {count(failed, 'answer')} failed: the referee's log says why")
    return said


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
    """Unix seconds as date and time; 0 where a record gives none."""
    if not at:
        return "a time that is not given"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    except (OverflowError, ValueError, OSError):  # no time of a clock
        return f"{at:g} s"


def plain(text: object) -> str:
    """Return what a server said, without characters that a terminal obeys or that cannot be seen, and not too long."""
    shown = printable(str(text))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
