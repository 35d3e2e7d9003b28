"""Detectors over the replayed tokens of one replica, one set for each stratum."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from serve_app.referee.judge.draws import DrawResult, DrawTest
from serve_app.referee.judge.drift import Cusum, Lean, Side, TokenDrift, is_unmistakable, request_drifted
from serve_app.referee.judge.evidence import CalibrationTest, RareTest
from serve_app.referee.judge.shift import KnownContexts, Move, ShiftTest
from serve_app.referee.judge.strata import KNOWN_AFTERWARDS, STRATA
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.telemetry.metric_names import REPLAY_ALARMS
from speculative.request import ReplayedToken

_DELTA = 1e-6 / (4 * len(STRATA))  # of each test, for one false alarm in a million replica lifetimes
_REQUEST_DELTA = 1e-6
_WRONG = 1000  # units of what rounding moves: more than it ever does
_JUMP_RATE = 1e-3  # share of the tokens whose logprobs rounding moves further than `Tolerance.jump_nats`


_SHIFTED = {
    "low": "served logprobs are lower than replayed ones on average",
    "high": "served logprobs are higher than replayed ones on average",
    "hotter": "tokens are less likely than those sampled from the model's distribution, as at a higher temperature",
    "colder": "tokens are more likely than those sampled from the model's distribution, as at a lower temperature",
}
_VERIFICATION = "the verification of drafts, the drafter's probabilities, and random numbers"
LOOK_AT = {
    "drift": "keys and values: handoff, prefix cache, new weights",
    **dict.fromkeys(("probability", "surprisal", "unlikely"), _VERIFICATION),
    "support": "filters and masks at drafted positions",
    "greedy": "the verification of drafts",
    "impossible": "the front end, and its limits",
    "wire": "the front end: how it reads requests, and writes replies",
    "draws": "random numbers, and the verification of drafts",
    "alternatives": "how logprobs of other tokens, and of prompts, are gathered",
    "missing": "the front end, where it hands finished requests in, and its log",
    "numerics": "the replica's log: its device, its kernels, and the form of its weights",
}
"""Where the cause of an alarm is looked for first, by the alarm."""


@dataclass(frozen=True, slots=True)
class SeenToken:
    """One replayed token."""

    strata: tuple[str, ...]
    drift: TokenDrift | None  # None if it was served without a logprob
    row: ReplayedToken | None  # the distribution it should follow; None if nothing was drawn
    made_by: str  # the replica that emitted it
    draw: DrawResult | None = None  # None = its draw was not made again
    others: TokenDrift | None = None  # of what was reported beside its logprob; None = nothing was compared
    move: Move | None = None  # None = it was served without a logprob, or its context is known
    context: int = 0  # the name of that in which it was drawn
    known: bool = False  # what it shows of rounding: its context has shown as much before
    drawn: bool = True  # with a random number that nobody chose, in a context that is new

    @property
    def distribution_terms(self) -> tuple[float, float] | None:
        """p(y) - sum p^2, and surprisal minus its mean, whose means are 0; None if the token was not drawn from p."""
        row = self.row
        if row is None or row.outside != 0 or not self.drawn or "greedy" in self.strata:
            return None
        return row.probability - row.expected_probability, row.surprisal - row.expected_surprisal


@dataclass(frozen=True, slots=True)
class Alarm:
    """The finding of a detector in a stratum, when the evidence of it began (unix seconds), and to which side the
    mean is shifted."""

    name: str
    stratum: str
    evidence_since: float
    side: Side = ""


class ReplicaWatch:
    """Observations of one replica since it was last trusted again."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._cusums: defaultdict[str, Cusum] = defaultdict(Cusum)
        self._leans: defaultdict[str, Lean] = defaultdict(Lean)
        self._jumps: defaultdict[str, RareTest] = defaultdict(lambda: RareTest(_JUMP_RATE, _DELTA))
        self._shifts: defaultdict[str, ShiftTest] = defaultdict(lambda: tolerance.shift_test(_DELTA))
        self._distributions: defaultdict[str, CalibrationTest] = defaultdict(lambda: tolerance.calibration_test(_DELTA))
        self._draws: defaultdict[str, DrawTest] = defaultdict(lambda: DrawTest(_DELTA))
        self._others = Cusum()
        self._known, self._tolerance = KnownContexts(), tolerance

    def see(self, tokens: Sequence[SeenToken], *, greedy: bool, drift_tolerance: float, at: float = 0.0) -> list[Alarm]:
        """Add one request's tokens, begun at that time (unix seconds); returns the alarms they raised."""
        alarms: list[Alarm] = []
        tokens = once(tokens, self._known, self._tolerance)
        for stratum, members in by_stratum(tokens).items():
            drifts = drifts_of(token for token in members if not token.known)
            cusum, jumps, shifts = self._cusums[stratum], self._jumps[stratum], self._shifts[stratum]
            risen = cusum.add((drift.counted for drift in drifts), drift_tolerance, at)
            jumps.add((drift.nats > self._tolerance.jump_nats for drift in drifts), at)
            shifts.add((token.move for token in members if token.move is not None), at)
            self._leans[stratum].add(drifts)
            since = [cusum.evidence_since] if risen else []
            if jumps.alarm:
                since.append(jumps.evidence_since)
                del self._jumps[stratum]  # an alarm latches: the test begins again, and finds what is still wrong
            if shifts.alarm:
                since.append(shifts.evidence_since)
                del self._shifts[stratum]
            if since:
                alarms.append(Alarm("drift", stratum, min(since), self._leans.pop(stratum).side))
            draws = self._draws[stratum]
            draws.add([token.draw for token in members if token.draw is not None and not token.known], at)
            if draws.alarm:
                alarms.append(Alarm("draws", stratum, draws.evidence_since))
                del self._draws[stratum]
            rows, drawn = rows_of(members)
            if stratum in KNOWN_AFTERWARDS or not rows:
                continue
            test = self._distributions[stratum]
            test.add(rows, greedy=greedy, drawn=drawn, at=at)
            if test.alarm is not None:
                alarms.append(Alarm(test.alarm, stratum, test.evidence_since, test.side))
                del self._distributions[stratum]
        others = [token.others.counted for token in tokens if token.others is not None and not token.known]
        if self._others.add(others, drift_tolerance, at):
            alarms.append(Alarm("alternatives", "all", self._others.evidence_since))
        return alarms


def once(tokens: Sequence[SeenToken], known: KnownContexts, tolerance: Tolerance) -> list[SeenToken]:
    """Mark tokens whose context has been seen: they are no draws that count; and they are known, unless they are
    further off than it was, or than rounding ever is."""
    shown = [_shown(token, tolerance) for token in tokens]
    before = known.add((token.context for token in tokens), shown)
    return [
        token if one is None else replace(token, known=now <= one and now < _WRONG, drawn=False)
        for token, one, now in zip(tokens, before, shown, strict=True)
    ]


def _shown(token: SeenToken, tolerance: Tolerance) -> int:
    """Return how far off a token is, in units of what rounding moves."""
    drifts = [drift for drift in (token.drift, token.others) if drift is not None]
    if token.draw is DrawResult.WRONG or any(is_unmistakable(drift, tolerance.jump_nats) for drift in drifts):
        return _WRONG
    nats = [drift.nats for drift in drifts]
    if token.row is not None:
        nats.append(token.row.gap if "greedy" in token.strata else token.row.outside)
    units = max(nats, default=0.0) / tolerance.edge_nats
    return int(units) if units < _WRONG else _WRONG  # what is no number, too


def drifts_of(tokens: Iterable[SeenToken]) -> list[TokenDrift]:
    """The drift of each token that was served with a logprob."""
    return [token.drift for token in tokens if token.drift is not None]


def by_stratum(tokens: Iterable[SeenToken]) -> dict[str, list[SeenToken]]:
    """The tokens of each stratum; one may be in several."""
    members: dict[str, list[SeenToken]] = {}
    for token in tokens:
        for stratum in token.strata:
            members.setdefault(stratum, []).append(token)
    return members


def rows_of(tokens: Sequence[SeenToken]) -> tuple[list[ReplayedToken], list[ReplayedToken]]:
    """The rows that show which tokens are allowed, and those that show their distribution."""
    rows = [token.row for token in tokens if token.row is not None and not token.known]
    return rows, [token.row for token in tokens if token.row is not None and token.drawn]


def why_drifted(tokens: Sequence[SeenToken], drift_tolerance: float, tolerance: Tolerance) -> str:
    """Return why the logprobs of one answer are too far off; "" = they are not."""
    if request_drifted(drifts_of(token for token in tokens if not token.known), drift_tolerance, tolerance.jump_nats):
        return "drift"
    shifted = why_shifted((token.move for token in tokens), tolerance)
    return f"drift: {shifted}" if shifted else ""


def why_shifted(moves: Iterable[Move | None], tolerance: Tolerance) -> str:
    """Return why one answer's own logprobs are shifted, with a false alarm in a million answers; "" = they are not."""
    known = [move for move in moves if move is not None]
    test = tolerance.shift_test(_REQUEST_DELTA)
    test.add(known)
    if not test.alarm:
        return ""
    mean = math.fsum(move.nats for move in known) / len(known)
    return f"its logprobs are {abs(mean):.2g} nats too {'low' if mean > 0 else 'high'} on average"


def distribution_alarm(
    rows: Iterable[ReplayedToken], drawn: Iterable[ReplayedToken], greedy: bool, tolerance: Tolerance
) -> str | None:
    """The alarm that one request's own tokens raise about their distribution; None = none. drawn: as of
    `CalibrationTest.add`."""
    test = tolerance.calibration_test(_REQUEST_DELTA)
    test.add(rows, greedy=greedy, drawn=drawn)
    return test.alarm


def meaning_of(alarm: str, side: str = "") -> str:
    """Return what an alarm of replays means."""
    return _SHIFTED.get(side) or REPLAY_ALARMS.get(alarm, alarm)
