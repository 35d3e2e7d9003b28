"""E-processes: bets against the claim that numbers have mean 0, which may be read at any time.

For numbers Z with |Z| <= 1 and conditional mean 0 the wealth W = mean over lambda of prod(1 + lambda Z) is a martingale
that starts at 1: it ever reaches 1/delta with probability at most delta (Ville, 1939), however often one looks.
Source of betting: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2010.09686).
"""

import math
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

STAKES = (-0.7, -0.4, -0.2, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""The lambdas that are bet with. Each is right for some size of a fault; together they need not be chosen."""

ROUNDING = 2e-5
"""Largest shift of a term's mean that rounding explains: the self-checks bet against a mean beyond it.
Float32 shifts it by 1e-5 at most; a fault that shifts no mean by more changes no text in a thousand."""

_RESOLUTION_S = 0.25  # of `FreshStarts.evidence_since`
_PERIODS = (8192, 65536, 524288, 4194304)  # counted numbers after which an e-process begins afresh; one never does


def log_wealth(log_products: Floats) -> Floats:
    """log W [...] of sums of log(1 + lambda Z) [..., len(STAKES)]."""
    most = log_products.max(axis=-1, keepdims=True)
    wealth: Floats = most[..., 0] + np.log(np.exp(log_products - most).mean(axis=-1))
    return wealth


class FreshStarts:
    """E-processes on one stream of numbers: one for life, and others that begin afresh on a fixed schedule.

    What was long in order leaves a life-long process poor; a fresh one sees at once what drifts off later. Start k is
    held to delta_k = 6 delta / (pi^2 k^2), so that all of them together raise a false alarm with probability at most
    delta, over however long a life.

    Args:
        delta: that probability.
        num_stakes: products that are kept for each process.
        periods: counted numbers after which a process begins afresh.
    """

    def __init__(self, delta: float, num_stakes: int = len(STAKES), periods: tuple[int, ...] = _PERIODS) -> None:
        self._log_delta = math.log(delta)
        self._num_starts = 0
        self._periods = np.array([math.inf, *periods])
        self._products = np.zeros((len(self._periods), num_stakes))
        self._counts = np.zeros(len(self._periods))
        self._thresholds = np.zeros(len(self._periods))
        self._lows = np.zeros(num_stakes)  # of the process for life
        self._low_at = np.zeros(num_stakes)
        self._at: float | None = None
        self.evidence_since = 0.0
        """Seconds at which the evidence of the last alarm began: the minimum of the winner's lifelong process."""
        self.winner = 0
        """Index of the stake that had won most at the last alarm."""
        self.restart()

    def restart(self) -> None:
        """Begin all of them again."""
        self._lows[:] = 0.0
        self._low_at[:] = self._at or 0.0
        self._begin(np.ones(len(self._periods), bool))

    def add(self, log_products: Floats, count: int, at: float = 0.0) -> bool:
        """Take in `count` numbers at once; whether an e-process crossed its threshold. Then all start again.

        Args:
            log_products: [num_stakes], their sum of log(1 + lambda Z).
            count: how many they are.
            at: when they were drawn, in seconds, for `evidence_since`.
        """
        if self._at is None:
            self._low_at[:] = at
        if self._at is None or not 0 <= at - self._at < _RESOLUTION_S:
            # With which stakes one for life never had less than now, before what is drawn at this time.
            self._at = at
            lower = self._products[0] <= self._lows
            self._lows[lower] = self._products[0, lower]
            self._low_at[lower] = at
        self._products += log_products
        self._counts += count
        near = (self._products.max(axis=1) >= self._thresholds).any()  # the wealth is a mean of the products
        alarm = bool(near and (log_wealth(self._products) >= self._thresholds).any())
        due = self._counts >= self._periods
        if alarm:
            richest = (log_wealth(self._products) - self._thresholds).argmax()
            self.winner = int(self._products[richest].argmax())
            self.evidence_since = float(self._low_at[self.winner])
            self.restart()
        elif due.any():
            self._begin(due)
        return alarm

    def add_each(self, log_products: Floats, at: float = 0.0) -> bool:
        """Take in numbers [N, num_stakes] that are looked at one by one; whether an e-process crossed its threshold.

        Those that raise no product cross none, so they are taken in together with the next that does.
        """
        rising = np.flatnonzero((log_products > 0).any(axis=1))
        alarms = [self.add(part.sum(axis=0), len(part), at) for part in np.split(log_products, rising + 1) if len(part)]
        return any(alarms)

    def leading(self) -> tuple[float, float]:
        """log W and threshold (nats) of the process that stands closest to its threshold."""
        wealth = log_wealth(self._products)
        closest = int((wealth - self._thresholds).argmax())
        return float(wealth[closest]), float(self._thresholds[closest])

    def _begin(self, which: Any) -> None:
        self._products[which] = 0.0
        self._counts[which] = 0
        for index in np.flatnonzero(which).tolist():
            self._num_starts += 1
            self._thresholds[index] = math.log(math.pi**2 * self._num_starts**2 / 6) - self._log_delta


class EProcess:
    """A latched alarm on numbers that come a few at a time; `shift` widens the claim to |mean| <= shift."""

    def __init__(self, delta: float, shift: float = 0.0) -> None:
        self._stakes = np.array(STAKES)
        self._shifts = shift * np.sign(self._stakes)
        self._processes = FreshStarts(delta)
        self.alarm = False

    @property
    def evidence_since(self) -> float:
        """Return it as `FreshStarts` does."""
        return self._processes.evidence_since

    @property
    def is_above(self) -> bool:
        """Return whether the alarm is for a mean above the claim, not below it."""
        return bool(self._stakes[self._processes.winner] > 0)

    def add(self, values: Floats, at: float = 0.0) -> None:
        """Take in values [N], each within [-1, 1], drawn at that time."""
        gains = np.log1p(self._stakes * (values[:, None] - self._shifts) / (1 + np.abs(self._shifts)))
        self.alarm |= self._processes.add(gains.sum(axis=0), len(values), at)
