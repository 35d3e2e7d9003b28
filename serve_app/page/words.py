"""Names in words for checks, and what an operator needs to know of a trip or an alarm."""

from dataclasses import dataclass
from typing import Any

from serve_app.referee.incidents import IncidentKind
from serve_app.referee.strata import STRATA
from serve_app.telemetry.metric_names import REPLAY_ALARMS, TRIP_REASONS
from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES

RUNBOOKS = "docs/runbooks.md"
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


@dataclass(frozen=True, slots=True)
class _Words:
    title: str
    meanings: dict[str, str]
    runbook: str
    effect: str  # what became of answers, and what to do first


_WORDS: dict[IncidentKind, _Words] = {
    "trip": _Words(
        "Breaker tripped",
        TRIP_REASONS,
        "TruespecBreakerOpen",
        "The replica stops speculating: its answers from then on are correct and slower. It tries again by itself; "
        "replace it if it trips again.",
    ),
    "canary": _Words(
        "Canary failed",
        {"canary": "speculation was tried again on requests of the replica's own, and a fault was found again"},
        "TruespecBreakerOpen",
        "Clients got plain answers meanwhile. It waits twice as long before the next; replace it if they keep failing.",
    ),
    "selfcheck": _Words(
        "Self-check alarm",
        CHECKS,
        "TruespecSelfCheckAlarm",
        "Answers before the trip may be wrong. Check that the breaker is open; find out what changed last.",
    ),
    "invariant": _Words(
        "Rule of the engine broken",
        INVARIANTS,
        "TruespecRuleBroken",
        "Nothing wrong was delivered: requests failed, or did without the cache. One replica: its GPU or memory. "
        "All: roll back.",
    ),
    "logprobs": _Words(
        "Logprob contract broken",
        LOGPROB_RULES,
        "TruespecRuleBroken",
        "These requests failed; nothing wrong was delivered. One replica: take it out. All: roll back.",
    ),
    "replay": _Words(
        "Replay alarm",
        REPLAY_ALARMS,
        "TruespecReplayAlarm",
        "Answers may be wrong. Check that the breaker is open; leave out suspect answers.",
    ),
    "independent": _Words(
        "Independent referee disagrees",
        {"disagrees": "transformers computes something else than the engine and its own replay"},
        "TruespecIndependentRefereeDisagrees",
        "All answers may be wrong. Roll back the last release; leave out answers since then.",
    ),
}


_WATCHED_EFFECT = (
    "Answers may be wrong, and nothing is switched off: this server is only watched. The report has an answer that "
    "shows it. Restart the server without speculation, and see whether the alarm comes back."
)


def runbook(alert: str) -> dict[str, str]:
    """Return where to read what to do at an alert; the page itself has the same as `page/runbooks.html`."""
    return {"name": alert, "page": RUNBOOKS}


def check_words() -> dict[str, dict[str, str]]:
    """Each self-check: a name, and what it compares."""
    return {check: {"name": CHECK_NAMES[check], "meaning": meaning} for check, meaning in CHECKS.items()}


def explained(incident: dict[str, Any], *, watched: bool = False) -> dict[str, Any]:
    """A trip or an alarm with a title, what it means, what to do first, and its runbook.

    Args:
        incident: as the referee reports it.
        watched: another server answers (`truespec watch`), which has no breaker of ours.
    """
    words = _WORDS[incident["kind"]]
    meaning = words.meanings.get(incident["name"], incident["name"])
    if strata := incident["strata"]:
        more = f", and {len(strata) - _NAMED_STRATA} more" if len(strata) > _NAMED_STRATA else ""
        meaning += f"; found among: {', '.join(STRATA[stratum] for stratum in strata[:_NAMED_STRATA])}{more}"
    return incident | {
        "title": words.title,
        "words": LABEL_NAMES.get(incident["name"], ""),
        "meaning": meaning,
        "effect": _WATCHED_EFFECT if watched else words.effect,
        "runbook": runbook(words.runbook),
    }
