"""Faults: findings of a referee that have one cause, and what to do about them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Finding = Mapping[str, Any]
"""A `WatchFinding` of a report."""

_WEIGHTS = (
    "Rule out the referee first: has it the server's weights (--model), and does it know how the server rounds "
    "(truespec watch calibrate, or --precision) and at which stage it takes its logprobs (--logprobs)? Then send the "
    "request below again without prefix caching, and with another attention backend."
)
_DRAFTS = (
    "Start the server without speculation and send the request below again; if the finding stays, without prefix "
    "caching and with another attention backend. The step that makes it disappear is the faulty one."
)
_DEFAULTS = (
    "Rule out sampling defaults that the server was started with and the referee does not know (--default NAME=VALUE). "
    f"{_DRAFTS}"
)
ADVICE = {
    "drift": _WEIGHTS,
    "greedy": _DRAFTS,
    "support": _DEFAULTS,
    "unlikely": _DRAFTS,
    "surprisal": _DEFAULTS,
    "probability": _DEFAULTS,
    "draws": _DRAFTS,
    "alternatives": "The logprobs of the emitted tokens are right, those reported beside them are not. Ask for the "
    "request below with and without top_logprobs and prompt logprobs, and in another batch.",
    "impossible": "Look at the server's front end: the verdict below names the limit that the answer breaks. Send the "
    "request again with speculation and without, as a stream and as a whole.",
}
"""Advice about each alarm. One cause raises many of them: of those that were raised, the first here counts."""


def faults(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Return findings by cause, as far as replica, test and time tell: those of one replica or of one test whose times
    overlap are one fault's. The first that was found comes first."""
    found: list[list[Finding]] = []
    for one in sorted(findings, key=lambda finding: float(finding["at"])):
        alike = [fault for fault in found if any(_are_alike(one, other) for other in fault)]
        found = [fault for fault in found if fault not in alike]
        found.append([*(other for fault in alike for other in fault), one])
    return sorted(found, key=lambda fault: float(fault[0]["at"]))


def _are_alike(one: Finding, other: Finding) -> bool:
    overlap: bool = one["evidence_since"] <= other["last_at"] and other["evidence_since"] <= one["last_at"]
    return overlap and any(one[name] == other[name] for name in ("replica", "alarm"))


def by_test(fault: Sequence[Finding]) -> dict[str, list[Finding]]:
    """The findings of a fault by the test that fired, in the order of `ADVICE`."""
    return {name: own for name in ADVICE if (own := [one for one in fault if one["alarm"] == name])}


def side_of(findings: Sequence[Finding]) -> str:
    """The side to which one test found means shifted; "" = to none, or now to this and now to that."""
    sides = {one["side"] for one in findings}
    return str(sides.pop()) if len(sides) == 1 else ""
