"""Detectors over the replayed tokens of one replica, one set for each stratum."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.integrity.drift import Cusum, TokenDrift
from serve_app.integrity.replays import KNOWN_AFTERWARDS
from serve_app.telemetry.metric_names import STRATA
from speculative.request import ReplayedToken
from speculative.selfcheck.replay import CalibrationTest, DriftTest

_DELTA = 1e-6 / (2 * len(STRATA))  # of each test, for one false alarm in a million replica lifetimes
_REQUEST_DELTA = 1e-6
_JUMP_NATS = 1.0  # rounding moves a logprob this far
_JUMP_RATE = 1e-3  # in at most this share of the tokens


@dataclass(frozen=True, slots=True)
class SeenToken:
    """One replayed token."""

    strata: tuple[str, ...]
    drift: TokenDrift
    row: ReplayedToken | None  # the distribution it should follow; None if nothing was drawn
    made_by: str  # the replica that reported its logprob

    @property
    def distribution_terms(self) -> tuple[float, float] | None:
        """p(y) - sum p^2, and surprisal minus its mean, whose means are 0; None if the token was not drawn from p."""
        row = self.row
        if row is None or row.outside != 0 or "greedy" in self.strata:
            return None
        return row.probability - row.expected_probability, row.surprisal - row.expected_surprisal


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far rounding may change a distribution without it counting as a fault."""

    distribution_tolerance: float = 0.01  # to the means of the calibration test's terms
    edge_nats: float = 1e-3  # to the place of a filter's edge, and to how far a token is from the likeliest

    def calibration_test(self, delta: float) -> CalibrationTest:
        """A test with this tolerance."""
        return CalibrationTest(tolerance=self.distribution_tolerance, edge_nats=self.edge_nats, delta=delta)


class ReplicaWatch:
    """What was observed of one replica since it was last trusted again."""

    def __init__(self, rounding: Rounding) -> None:
        self._cusums: defaultdict[str, Cusum] = defaultdict(Cusum)
        self._jumps: defaultdict[str, DriftTest] = defaultdict(lambda: DriftTest(_JUMP_NATS, _JUMP_RATE, _DELTA))
        self._distributions: defaultdict[str, CalibrationTest] = defaultdict(lambda: rounding.calibration_test(_DELTA))

    def see(self, tokens: Sequence[SeenToken], *, greedy: bool, drift_tolerance: float) -> list[tuple[str, str]]:
        """Add one request's tokens; returns the alarms they raised, each with its stratum."""
        alarms = []
        for stratum, members in by_stratum(tokens).items():
            if self._drifts(stratum, members, drift_tolerance):
                alarms.append(("drift", stratum))
            alarm = None if stratum in KNOWN_AFTERWARDS else self._breaks_distribution(stratum, members, greedy)
            if alarm is not None:
                alarms.append((alarm, stratum))
        return alarms

    def _drifts(self, stratum: str, tokens: Sequence[SeenToken], tolerance: float) -> bool:
        cusum, jumps = self._cusums[stratum], self._jumps[stratum]
        risen = cusum.add((token.drift.excess for token in tokens), tolerance)
        jumps.add(token.drift.nats for token in tokens)
        jumped = jumps.alarm
        if jumped:
            del self._jumps[stratum]
        return risen or jumped

    def _breaks_distribution(self, stratum: str, tokens: Sequence[SeenToken], greedy: bool) -> str | None:
        rows = [token.row for token in tokens if token.row is not None]
        if not rows:
            return None
        self._distributions[stratum].add(rows, greedy=greedy)
        alarm = self._distributions[stratum].alarm
        if alarm is not None:
            del self._distributions[stratum]
        return alarm


def by_stratum(tokens: Iterable[SeenToken]) -> dict[str, list[SeenToken]]:
    """The tokens of each stratum; one may be in several."""
    members: dict[str, list[SeenToken]] = {}
    for token in tokens:
        for stratum in token.strata:
            members.setdefault(stratum, []).append(token)
    return members


def distribution_alarm(tokens: Sequence[SeenToken], greedy: bool, rounding: Rounding) -> str | None:
    """The alarm that one request's own tokens raise about their distribution; None = none."""
    test = rounding.calibration_test(_REQUEST_DELTA)
    test.add([token.row for token in tokens if token.row is not None], greedy=greedy)
    return test.alarm
