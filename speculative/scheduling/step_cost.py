"""The cost of a step, in seconds, learned from the steps that were timed."""

import math
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from operator import mul
from statistics import median
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

_WARM_UP_STEPS = 2
_CALIBRATION_STEPS = 20  # steps that try every length, so that their cost is known
_BORROWED = 0.1  # weight of what was seen there
_BELIEF = 2.0  # steps that the regression counts as, for a number of rows that was seen


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step.

    num_drafts: rows that all drafts take.
    longest: drafts that a drafter made for one sequence, one behind the other; 0 where it made none.
    context: tokens of all its sequences.
    num_missed: tokens that the drafter had to catch up with.
    """

    num_sequences: int
    num_drafts: int
    longest: int
    context: int
    num_missed: int = 0


# What makes the features of a step about 1: one, sequences, drafts, longest draft, whether a drafter has to catch up
# before its first draft, context, the contexts of all drafts, tokens that the drafter missed.
_SCALES = (1.0, 4.0, 4.0, 4.0, 1.0, 1024.0, 1024.0, 16.0)
_COUNT = len(_SCALES)
_RIDGE = np.diag([0.0] + [1.0] * (_COUNT - 1))
_OF_CONTEXT = slice(5, 7)
_OF_MISSED = 7
_LONG = 64  # tokens of a prompt that show what a missed one costs
_OF_PACE = 0.1  # share of a surprise that is ascribed to the machine's pace
_PACE_KEPT = 0.98  # of how far the pace is from the usual one, a step later
_MOST_EXPLAINED = 0.9  # share of a step's time: it cannot be that one costs nothing before there is work
_SLOW = 1.5  # times what was expected: what a step that took longer counts as
_SOLVE_EVERY = 32  # steps, once they are known; until then what rows cost is corrected step by step
_KEEP = 0.995  # what is left of a step's weight when the next comes


@dataclass(slots=True)
class StepCost:
    """Seconds of a step at the machine's usual pace: a regression on its work, corrected for each number of rows that
    was seen lately. What neighbours take from the machine slows all steps, so their pace is followed apart: a length
    that happened to be tried while the machine was slow is not taken for a dear one.

    Old steps count less (about the last two hundred count), and more work never costs less. A step that took far longer
    than expected counts as a slow one, no more: something else had the machine. The very first are not looked at.
    """

    num_observed: int = 0
    is_borrowed: bool = False  # begun with what is known of another load
    num_plain: int = 0  # steps that were planned without drafts, to begin with
    _fastest: float = float("inf")
    _pace: float = 1.0  # seconds that steps take just now, to those that they usually take
    _squares: Floats = field(default_factory=lambda: np.zeros((_COUNT, _COUNT)))
    _products: Floats = field(default_factory=lambda: np.zeros(_COUNT))
    _lent: tuple[Floats, Floats] = field(default_factory=lambda: (np.zeros((_COUNT, _COUNT)), np.zeros(_COUNT)))
    _weights: list[float] = field(default_factory=lambda: [0.0] * _COUNT)  # of the last solution
    _calibrating: list[tuple[list[float], float]] = field(default_factory=list)  # features and seconds
    _unsolved: list[tuple[list[float], float]] = field(default_factory=list)  # the same, since the last solution
    _residuals: dict[int, tuple[float, float]] = field(default_factory=dict)  # by rows: weight, relative mean

    @property
    def is_known(self) -> bool:
        """Return whether enough steps were seen."""
        return self.num_observed >= _CALIBRATION_STEPS

    def lend(self) -> "StepCost":
        """To begin with at another load."""
        lent = StepCost(is_borrowed=True)
        self._count_unsolved()
        lent._lent = _BORROWED * self._squares, _BORROWED * self._products
        lent._weights = list(self._weights)
        return lent

    def observe(self, work: Work, seconds: float) -> None:
        """Count a step."""
        self.num_observed += 1
        if self.num_observed <= _WARM_UP_STEPS:
            return
        features = self._features(work)
        if self.num_observed <= _CALIBRATION_STEPS:
            self._fastest = min(self._fastest, seconds)
            self._calibrating.append((features, seconds))
            if self.is_borrowed:
                self._limit_context(features, seconds)
            self._calibrate()
            return
        self._unsolved.append((features, self._correct(features, seconds)))
        if self.num_observed % _SOLVE_EVERY == 0:
            self._solve()

    def observe_catching_up(self, work: Work, seconds: float) -> None:
        """Count a step in which a drafter computed a prompt: that shows what a missed token costs, and little else."""
        if work.num_missed < _LONG or self.num_observed < _WARM_UP_STEPS:
            return
        (expected,) = self.seconds(work.num_sequences, [work.num_drafts], [work.longest], work.context)
        self._weights[_OF_MISSED] = max(0.0, seconds - expected) / work.num_missed * _SCALES[_OF_MISSED]

    def of_catching_up(self, num_missed: int) -> float:
        """Expected seconds of a drafter for tokens that it missed."""
        return self._weights[_OF_MISSED] / _SCALES[_OF_MISSED] * num_missed

    def seconds(
        self, num_sequences: int, drafts: Sequences[float], longest: Sequences[float], context: int
    ) -> list[float]:
        """Expected seconds of steps with so many drafts, of which the longest have so many tokens."""
        weights = [weight / scale for weight, scale in zip(self._weights, _SCALES, strict=True)]
        plain = weights[0] + weights[1] * num_sequences + weights[5] * context
        per_draft, per_position, drafting = weights[2] + weights[6] * context / num_sequences, *weights[3:5]
        return [
            (plain + per_draft * count + per_position * most + drafting * (most > 0))
            * self._correction(num_sequences + round(count))
            for count, most in zip(drafts, longest, strict=True)
        ]

    def with_and_without_drafts(self, work: Work, seconds: float) -> tuple[float, float]:
        """Return what a step that took so long counts as, and the expected seconds of the same one without drafts, both
        at the machine's present pace; neither holds what else had the machine for a step."""
        drafts, longest = [work.num_drafts, 0], [work.longest, 0]
        expected, plain = self.seconds(work.num_sequences, drafts, longest, work.context)
        slow = _SLOW * self._pace * (expected + self.of_catching_up(work.num_missed))
        return min(seconds, slow), self._pace * plain

    @property
    def _knows_context(self) -> bool:
        """Return whether the cost of context is taken from another load as it is: it is the same at any load."""
        return self.is_borrowed and self.num_observed <= _CALIBRATION_STEPS

    def _limit_context(self, features: list[float], seconds: float) -> None:
        """Lower what context is believed to cost, where a step leaves no room for it: what short contexts showed at the
        other load may be far off."""
        of_context = self._weights[_OF_CONTEXT]
        known = sum(map(mul, of_context, features[_OF_CONTEXT]))
        if known > _MOST_EXPLAINED * seconds:
            self._weights[_OF_CONTEXT] = [_MOST_EXPLAINED * seconds / known * weight for weight in of_context]

    def _calibrate(self) -> None:
        """Solve for all steps so far. One that took far longer than others of its kind counts as a usual one; where
        there are hardly any, one that took far longer than the regression has it."""
        self._solve_only(self._calibrating)
        kinds: dict[int, list[float]] = {}
        for own, seconds in self._calibrating:
            kinds.setdefault(_rows(own), []).append(seconds)
        usual = list[tuple[list[float], float]]()
        for own, seconds in self._calibrating:
            kind = kinds[_rows(own)]
            expected = median(kind) if len(kind) > 2 else self._regression(own)
            usual.append((own, expected if seconds > _SLOW * expected else seconds))
        self._solve_only(usual)
        if self.is_known:
            for own, seconds in usual:
                self._correct(own, seconds)
            self._calibrating.clear()

    def _solve_only(self, steps: Sequences[tuple[list[float], float]]) -> None:
        """Solve for these steps and what was known before."""
        self._squares, self._products = self._lent
        self._unsolved = list(steps)
        self._solve()

    def _regression(self, features: list[float]) -> float:
        return math.fsum(map(mul, self._weights, features))

    def _correct(self, features: list[float], seconds: float) -> float:
        """Learn how far a step was from what was expected; the seconds that it counts as, at the usual pace."""
        rows = _rows(features)
        regression, correction = self._regression(features), self._correction(rows)
        surprise = min(seconds / (self._pace * regression * correction), _SLOW) - 1
        usual = regression * correction * (1 + surprise)
        if 1 + surprise < _SLOW:  # else something had the machine for this one step
            self._pace = 1 + _PACE_KEPT * (self._pace * (1 + _OF_PACE * surprise) - 1)
        weight, mean = self._residuals.get(rows, (0.0, 0.0))
        weight, total = 0.95 * weight + 1, 0.95 * weight * mean + usual / regression - 1
        self._residuals[rows] = (weight, total / weight)
        return usual

    def _correction(self, rows: int) -> float:
        weight, mean = self._residuals.get(rows, (0.0, 0.0))
        return 1 + mean * weight / (weight + _BELIEF)

    def _features(self, work: Work) -> list[float]:
        count, num_drafts, context = work.num_sequences, work.num_drafts, work.context
        read = context * num_drafts / count
        values = (1, count, num_drafts, work.longest, work.longest > 0, context, read, work.num_missed)
        return [value / scale for value, scale in zip(values, _SCALES, strict=True)]

    def _count_unsolved(self) -> None:
        """Add the steps since the last solution to the sums of the regression, older ones with less weight."""
        if not self._unsolved:
            return
        features = np.array([own for own, _ in self._unsolved])  # [N, features]
        seconds = np.array([seconds for _, seconds in self._unsolved])
        weights = _KEEP ** np.arange(len(seconds) - 1, -1, -1) * self._importance(seconds)
        if self._knows_context:
            seconds -= features[:, _OF_CONTEXT] @ self._weights[_OF_CONTEXT]
            features[:, _OF_CONTEXT] = 0.0
        self._squares = _KEEP ** len(seconds) * self._squares + (weights * features.T) @ features
        self._products = _KEEP ** len(seconds) * self._products + (weights * features.T) @ seconds
        self._unsolved.clear()

    def _importance(self, seconds: Floats) -> Floats:
        """The weight of steps that took so long, [N]: noise is a share of a step's time, so a step that takes ten times
        as long has a hundredth of the weight."""
        return np.minimum(1.0, self._fastest / seconds) ** 2

    def _solve(self) -> None:
        """A regression that leaves its last solution only as far as recent steps tell; no slope is negative."""
        self._count_unsolved()
        products = self._products + _RIDGE @ np.array(self._weights)
        slopes = np.maximum(np.linalg.solve(self._squares + _RIDGE, products)[1:], 0.0)
        count, sums = self._squares[0, 0], self._squares[0, 1:]
        mean = self._products[0] / count
        explained = float(slopes @ sums) / count
        if explained > _MOST_EXPLAINED * mean:
            slopes *= _MOST_EXPLAINED * mean / explained
            explained = _MOST_EXPLAINED * mean
        of_context = self._weights[_OF_CONTEXT]
        self._weights = [float(mean - explained), *slopes.tolist()]
        if self._knows_context:
            self._weights[_OF_CONTEXT] = of_context


def _rows(features: list[float]) -> int:
    """Return the rows of the step that the features describe."""
    return round(features[1] * _SCALES[1] + features[2] * _SCALES[2])
