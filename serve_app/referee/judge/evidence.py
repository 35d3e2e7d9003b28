"""Tests over many replays: whether the logprobs that were served drifted, and whether the tokens follow the
distribution.

The calibration test and the drift are different tests. One engine served the right logprobs of garbage tokens, which no
drift sees; another drew from a wrong distribution and served that distribution's logprobs, which drift sees first."""

import math
from collections.abc import Iterable

import numpy as np

from serve_app.referee.judge.drift import Side
from speculative.request import SURPRISAL_CLIP_NATS, ReplayedToken
from speculative.selfcheck.eprocess import EProcess, FreshStarts

_RATE_STAKES = np.array((0.5, 0.2, 0.05, 0.01))  # shares of the most that may be staked on a rare event
_RATE_PERIODS = (256, 4096)
_UNLIKELY_STAKES = np.array((0.3, 0.1, 0.03, 0.01))
_UNLIKELY_PERIODS = (1024, 16_384)
_MOST_TOKENS = 2.0**18  # no vocabulary is larger
_MOST_GAIN = 1e4  # of one token, so that none raises an alarm alone


class _Bets:
    """A latched alarm of bets that lose on average where nothing is wrong."""

    def __init__(self, stakes: np.ndarray, periods: tuple[int, ...], delta: float) -> None:
        self._stakes = stakes
        self._processes = FreshStarts(delta, len(stakes), periods)
        self.alarm = False

    @property
    def evidence_since(self) -> float:
        """Return it as `FreshStarts` does."""
        return self._processes.evidence_since

    def _bet(self, gains: np.ndarray, at: float) -> None:
        self.alarm |= self._processes.add_each(np.log1p(self._stakes * gains[:, None]), at)


class RareTest(_Bets):
    """A latched alarm where something happens in more than a share `rate` of cases."""

    def __init__(self, rate: float, delta: float) -> None:
        super().__init__(_RATE_STAKES / rate, _RATE_PERIODS, delta)
        self._rate = rate

    def add(self, events: Iterable[bool], at: float = 0.0) -> None:
        """Take in cases of that time: whether it happened."""
        self._bet(np.array(list(events), float) - self._rate, at)


class UnlikelyTest(_Bets):
    """A latched alarm where tokens are sampled that p all but excludes: a bet on the uniform distribution over all
    tokens.

    For y sampled from p over at most V tokens, 1 / (V p(y)) has mean at most 1, so the product of 1 + lambda (1 / (V
    p(y)) - 1) is an e-process. A few tokens of garbage are enough, where a test of means needs hundreds of tokens.

    Args:
        edge_nats: what rounding may shift log p by.
        delta: probability of a false alarm, whenever one looks.
    """

    def __init__(self, edge_nats: float, delta: float) -> None:
        super().__init__(_UNLIKELY_STAKES, _UNLIKELY_PERIODS, delta)
        self._scale = math.exp(-edge_nats) / _MOST_TOKENS

    def add(self, probabilities: Iterable[float], at: float = 0.0) -> None:
        """Take in p(y) of tokens that were sampled at that time."""
        ratios = self._scale / np.maximum(np.array(list(probabilities), float), 1e-30)
        # A probability that is no number counts as the most that one token can gain.
        self._bet(np.fmin(ratios, _MOST_GAIN) - 1, at)


class CalibrationTest:
    """A test for served tokens that do not follow the distribution that a replay finds for them.

    Args:
        tolerance: |mean| of p(y) - sum(p^2), and of surprisal minus its mean over 10 nats, that rounding may bring.
        edge_nats: what rounding may shift a filter's edge, or the likeliest token, by.
        rate: the share of tokens that rounding may shift further.
        delta: probability of a false alarm, whenever one looks; a fifth of it for each of the five tests.
    """

    def __init__(
        self, tolerance: float = 0.0, edge_nats: float = 1e-3, rate: float = 1e-3, delta: float = 1e-6
    ) -> None:
        self._edge_nats = edge_nats
        self._probability = EProcess(delta / 5, tolerance)
        self._surprisal = EProcess(delta / 5, tolerance)
        self._support = RareTest(rate, delta / 5)
        self._greedy = RareTest(rate, delta / 5)
        self._unlikely = UnlikelyTest(edge_nats, delta / 5)
        self._forbidden_at: float | None = None

    def add(
        self,
        rows: Iterable[ReplayedToken],
        *,
        greedy: bool,
        drawn: Iterable[ReplayedToken] | None = None,
        at: float = 0.0,
    ) -> None:
        """Take in the replayed rows of a request of that time; of a greedy one only whether its tokens are the
        likeliest. drawn: those whose distribution is tested, too; None = all."""
        rows = list(rows)
        if self._forbidden_at is None and any(row.outside == math.inf for row in rows):
            self._forbidden_at = at
        if greedy:
            self._greedy.add((row.gap > self._edge_nats for row in rows), at)
            return
        self._support.add((row.outside > self._edge_nats for row in rows), at)
        inside = [row for row in (rows if drawn is None else drawn) if row.outside == 0]
        differences = np.array(
            [(row.probability - row.expected_probability, row.surprisal - row.expected_surprisal) for row in inside]
        ).reshape(-1, 2)
        self._unlikely.add((row.probability for row in inside), at)
        self._probability.add(differences[:, 0], at)
        self._surprisal.add(differences[:, 1] / SURPRISAL_CLIP_NATS, at)

    @property
    def alarm(self) -> str | None:
        """Return which test found the tokens at fault: support, greedy, unlikely, probability or surprisal; None when
        none did."""
        return self._found[0] if self._found else None

    @property
    def side(self) -> Side:
        """Return whether the tokens are as if drawn at a higher or a lower temperature; "" = no such test found them
        at fault."""
        if self.alarm not in ("probability", "surprisal"):
            return ""
        likelier = self._probability.is_above if self.alarm == "probability" else not self._surprisal.is_above
        return "colder" if likelier else "hotter"

    @property
    def evidence_since(self) -> float:
        """Since when the evidence of the alarm was gathered, in seconds; 0 if there is none."""
        return self._found[1] if self._found else 0.0

    @property
    def _found(self) -> tuple[str, float] | None:
        if self._forbidden_at is not None:
            return "support", self._forbidden_at
        tests: dict[str, RareTest | EProcess | UnlikelyTest] = {
            "support": self._support,
            "greedy": self._greedy,
            "unlikely": self._unlikely,
            "probability": self._probability,
            "surprisal": self._surprisal,
        }
        return next(((name, test.evidence_since) for name, test in tests.items() if test.alarm), None)
