"""Names in words for checks, and what an operator needs to know of a trip, an alarm or another fault: what the alert
says that stands for it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from serve_app.referee.book.incidents import IncidentKind
from serve_app.referee.judge.detectors import LOOK_AT, meaning_of
from serve_app.referee.judge.strata import STRATA
from serve_app.telemetry.metric_names import DETECTORS, REPLAY_ALARMS, TRIP_REASONS
from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES, SAMPLED_INVARIANTS

_NAMED_STRATA = 3

CHECK_NAMES = {
    "a": "accept step",
    "a_prime": "draft acceptance",
    "b": "accept decision",
    "c": "output at drafts",
    "d": "output tokens",
    "e": "draft tokens",
    "f": "recovered tokens",
    "g": "sampling noise",
    "r": "residual",
    "lag_b": "accept decision, next round",
    "lag_g": "sampling noise, next round",
    "coin": "number of drafts",
    "coupled_a_prime": "draft acceptance, seeded",
    "coupled_c": "output at drafts, seeded",
    "coupled_d": "output tokens, seeded",
    "coupled_e": "draft tokens, seeded",
}
LABEL_NAMES = CHECK_NAMES | {
    "q_missing": "drafts without their distribution",
    "q_zero": "drafts of probability 0",
    "p_zero": "tokens of probability 0",
}
"""Names on the page for values of labels whose own names are letters."""

_RUNBOOK = re.compile(
    r"^## (Truespec\w+)\n\nSeverity (\w+);.*\n\n\*\*What it means\.\*\* (.*)\n\n"
    r"\*\*Where to look\.\*\* .*\n\n\*\*What to do\.\*\* (.*)$",
    re.M,
)
_INCIDENTS: dict[IncidentKind, tuple[str, dict[str, str]]] = {  # the alert, and what each name means
    "trip": ("TruespecBreakerOpen", TRIP_REASONS),
    "canary": (
        "TruespecBreakerOpen",
        {"canary": "speculation was tried again on requests of the replica's own, and a fault was found again"},
    ),
    "selfcheck": ("TruespecSelfCheckAlarm", CHECKS),
    "invariant": ("TruespecRuleBroken", INVARIANTS),
    "logprobs": ("TruespecRuleBroken", LOGPROB_RULES),
    "replay": ("TruespecReplayAlarm", REPLAY_ALARMS),
    "independent": (
        "TruespecIndependentRefereeDisagrees",
        {"disagrees": "transformers computes something else than the engine and its own replay"},
    ),
}


@dataclass(frozen=True, slots=True)
class Runbook:
    """An alert's words."""

    title: str
    tone: str  # `bad` or `warn`
    meaning: str
    effect: str  # what became of answers, and what to do


@cache
def runbooks() -> dict[str, Runbook]:
    """Return the words of each alert, from the runbooks that are made of the alerts."""
    file = resources.files("serve_app.http.page") / "static" / "runbooks.md"  # that of the docs, of this version
    return {
        alert: Runbook(
            _title(alert),
            "bad" if severity == "critical" else "warn",
            meaning.replace("`", ""),
            effect.replace("`", ""),
        )
        for alert, severity, meaning, effect in _RUNBOOK.findall(file.read_text(encoding="utf-8"))
    }


def _title(alert: str) -> str:
    """Return an alert's name in words: `KV cache full`."""
    first, *others = re.findall("[A-Z][a-z]+", alert.removeprefix("Truespec"))
    return " ".join([first.upper() if first in ("Kv", "Tme") else first, *map(str.lower, others)])


def explained(incident: dict[str, Any], shares: Mapping[str, float]) -> dict[str, Any]:
    """Return a trip or an alarm, as the referee reports it, with its alert's title, what it means and what to do.

    shares: that detectors look at, by their settings.
    """
    alert, meanings = _INCIDENTS[incident["kind"]]
    is_sampled = incident["kind"] == "invariant" and incident["name"] in SAMPLED_INVARIANTS
    detector = DETECTORS.get("sampled" if is_sampled else incident["kind"])
    is_replay = incident["kind"] == "replay"
    meaning = meanings.get(incident["name"], incident["name"])
    meaning = meaning_of(incident["name"], incident["side"]) if is_replay else meaning
    if strata := incident["strata"]:
        more = f", and {len(strata) - _NAMED_STRATA} more" if len(strata) > _NAMED_STRATA else ""
        meaning += f"; found among: {', '.join(STRATA[stratum] for stratum in strata[:_NAMED_STRATA])}{more}"
    said = runbooks()[alert]
    return incident | {
        "title": said.title,
        "words": LABEL_NAMES.get(incident["name"], ""),
        "meaning": meaning,
        "effect": said.effect,
        "unseen": "" if detector is None else detector.means_for_answers(shares.get(detector.setting)),
        "look": f"Look first at {LOOK_AT[incident['name']]}." if is_replay else "",
        "runbook": alert,
    }
