"""The cost of a step, in seconds: a line fitted to trials, then corrected by the steps that are timed."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence as Sequences
from operator import mul
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

_BEFORE = 2  # steps that set things up
_TRIALS = 20  # steps behind them, which are fitted
_FITS = 4  # each takes those steps less seriously that the last one missed
_EXACT = 0.02  # share of a step's time by which a fit may miss it
_SLOW = 1.5  # times what was expected: what a step that took longer counts as
_OF_PACE = 0.1  # share of a surprise that is ascribed to the machine's pace
_PACE_KEPT = 0.98  # of how far the pace is from that of the trials, a step later: what stays is a matter of rows
_KNOWN = 3  # steps with as many rows, after which a surprise is one
_OF_ROWS = 0.03  # share of a surprise that is ascribed to the number of rows, in the long run
# By feature: what makes it about 1, and how far its slope is drawn to what was known before. A token of context costs
# the same at any load, so another load's trials show it better than a load's own, which have hardly any.
_SCALES = np.array([1.0, 8.0, 4.0, 1.0, 1024.0, 1024.0, 64.0])
_RIDGES = np.array([0.0, *[0.002] * 3, *[0.02] * 3])
_FURTHER = 4  # times the longest context of the trials: up to there the line goes on
_RIDGES_OF_LENT = np.array([0.0, *[0.002] * 3, *[0.1] * 3])


class Work(NamedTuple):
    """The work of a step."""

    num_sequences: int
    num_drafts: float  # rows that all drafts take, or as many as are expected
    longest: int  # drafts that a drafter made for one sequence, one behind the other; 0 where it made none
    context: int  # tokens of all its sequences
    num_missed: float = 0.0  # tokens that the drafter had to catch up with

    @property
    def features(self) -> tuple[float, ...]:
        """What the line is over: one, rows, the drafter's passes, context, context that drafts read, tokens missed."""
        rows, read = self.num_sequences + self.num_drafts, self.context * self.num_drafts / self.num_sequences
        return 1.0, rows, self.longest, self.longest > 0, self.context, read, self.num_missed


class StepCost:
    """Seconds of steps with about as many sequences.

    More work never costs less. Later steps correct the line for each number of rows. What neighbours take from the
    machine slows all steps, so their pace is followed apart: a length that happened to be tried while the machine was
    slow is not taken for a dear one. A step that took far longer than expected counts as a slow one, no more.

    Args:
        near: what is known of another load, which is believed until there were enough trials.
    """

    def __init__(self, near: "StepCost | None" = None) -> None:
        self.is_borrowed = near is not None
        self.is_known = False
        self._line: list[float] = [0.0] * len(_SCALES) if near is None else near._line
        self._longest_context: float = 0.0 if near is None else near._longest_context  # of one sequence
        self._trials: list[tuple[Work, float]] = []
        self._pace = 1.0  # seconds that steps take just now, to those that they took in the trials
        self._of_rows: dict[int, tuple[int, float]] = {}  # steps seen, and their seconds to those of the line
        self._seen: list[int] = []  # its numbers of rows, in order

    def seconds(self, work: Work) -> float:
        """Expected seconds of a step at the machine's present pace."""
        context = min(work.context, int(_FURTHER * self._longest_context * work.num_sequences))
        features = work._replace(context=context).features
        return self._pace * self._ratio(round(features[1])) * math.fsum(map(mul, self._line, features))

    def _ratio(self, rows: int) -> float:
        """Return how many times the line's seconds so many rows take: as the nearest number of them that was seen."""
        if rows not in self._of_rows and self._seen:
            place = bisect_left(self._seen, rows)
            rows = min(self._seen[max(0, place - 1) : place + 1], key=lambda seen: abs(seen - rows))
        return self._of_rows.get(rows, (0, 1.0))[1]

    def usual(self, work: Work, seconds: float) -> float:
        """What a step that took so long counts as, without what else had the machine for it."""
        return min(seconds, _SLOW * self.seconds(work))

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step."""
        if self.is_known:
            self._correct(work, seconds)
            return
        self._trials.append((work, seconds))
        if len(self._trials) == _BEFORE + _TRIALS:
            trials, self._trials = self._trials[_BEFORE:], []
            self._fit(trials)
            self.is_known = True
            for trial in trials:
                self._correct(*trial)

    def _correct(self, work: Work, seconds: float) -> None:
        """Ascribe what was not expected to the pace and to the number of rows."""
        surprise = min(seconds / self.seconds(work), _SLOW) - 1
        rows = round(work.features[1])
        count, ratio = self._of_rows.get(rows, (0, self._ratio(rows)))
        if not count:
            insort(self._seen, rows)
        # Otherwise something else had the machine for this one step, or the line errs.
        if surprise < _SLOW - 1 and count >= _KNOWN:
            self._pace = 1 + _PACE_KEPT * (self._pace * (1 + _OF_PACE * surprise) - 1)
        self._of_rows[rows] = count + 1, ratio * (1 + max(_OF_ROWS, 1 / (count + 3)) * surprise)

    def _fit(self, trials: Sequences[tuple[Work, float]]) -> None:
        """Find the line for which the sum of errors, as shares of the steps' times, is least."""
        seconds = np.array([seconds for _, seconds in trials])
        scales = _SCALES / np.median(seconds)
        features = np.array([work.features for work, _ in trials]) / seconds[:, None] / scales
        ridges, prior = _RIDGES_OF_LENT if self.is_borrowed else _RIDGES, np.array(self._line) * scales
        importance = np.ones(len(trials))
        for _ in range(_FITS):
            line = _least_squares(features, importance, importance.sum() * ridges, prior)
            importance = 1 / np.maximum(np.abs(features @ line - 1), _EXACT)
        self._line = (line / scales).tolist()
        self._longest_context = max(self._longest_context, *(work.context / work.num_sequences for work, _ in trials))


def _least_squares(features: Floats, importance: Floats, ridges: Floats, prior: Floats) -> Floats:
    """The line by which features [N, F] come closest to 1, with no slope below 0, drawn towards `prior`."""
    squares = (importance * features.T) @ features + np.diag(ridges)
    products = importance @ features + ridges * prior
    used = np.ones(len(prior), bool)
    while True:
        line = np.zeros(len(prior))
        line[used] = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        if line.min() >= 0:
            return line
        used[line.argmin()] = False
