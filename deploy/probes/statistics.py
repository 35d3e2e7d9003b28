"""Tests whose false-alarm rate is bounded for any sample size."""

import math

import numpy as np

from speculative.selfcheck.eprocess import EProcess, Floats


def binomial_tail(num: int, events: int, rate: float) -> float:
    """P(Binomial(num, rate) >= events)."""
    if events <= 0:
        return 1.0
    if rate <= 0 or events > num:
        return 0.0
    if rate >= 1:
        return 1.0
    counts = np.arange(events, num + 1)
    logs = [_log_choose(num, int(k)) for k in counts] + counts * math.log(rate) + (num - counts) * math.log1p(-rate)
    return float(min(1.0, np.exp(logs).sum()))


def too_many(num: int, events: int, rate: float, delta: float) -> bool:
    """Return whether this many events show a rate above `rate`; the false-alarm rate is at most delta."""
    return binomial_tail(num, events, rate) <= delta


def departs(num: int, events: int, rate: float, shift: float, delta: float) -> bool:
    """Return whether this many events show a rate more than `shift` from `rate`; the false-alarm rate is at most
    delta."""
    more = binomial_tail(num, events, min(1.0, rate + shift))
    fewer = binomial_tail(num, num - events, min(1.0, 1 - rate + shift))
    return min(more, fewer) <= delta / 2


def mean_departs(values: Floats, shift: float, delta: float) -> bool:
    """Return whether values in [-1, 1] with conditional mean 0 (up to `shift`) depart from it; an e-process, evaluated
    after every value."""
    process = EProcess(delta, shift)
    for value in values:
        process.add(np.array([value]))
    return process.alarm


def _log_choose(num: int, chosen: int) -> float:
    return math.lgamma(num + 1) - math.lgamma(chosen + 1) - math.lgamma(num - chosen + 1)
