"""Early exits from drafting: where another draft is likely to cost more than it gains.

A drafter's confidence in its draft predicts whether the draft is accepted (Li et al., "EAGLE-2", 2406.16858, section
3). How well it predicts that is measured here, not assumed.

Where drafting ends is a function of the tokens before that point and of q, so no distribution changes: whether a
position is drafted is known before its token is drawn; a verifier that accepts a draft has the same tokens before it.
"""

from bisect import bisect
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])  # between classes of probability

_EDGES: list[float] = EDGES.tolist()
_MIDDLES = (np.append(0.0, EDGES) + np.append(EDGES, 1.0)) / 2
# Priors, about as good as the shipped head: of sampled drafts, and of likeliest-token ones.
_SURVIVAL = np.stack([0.4 + 0.55 * _MIDDLES, 0.1 + 0.89 * _MIDDLES])
_FOLLOWING = np.stack([0.45 + 0.1 * _MIDDLES, 0.5 + 0.35 * _MIDDLES])
_BELIEF = 8.0  # rounds that the prior counts as
_KEEP = 0.998  # of a class's counts, each time it is seen again


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """The rule by which a draft goes on: while the chance that its next token is accepted, too, is at least `least`.

    survival: [2, C] float64, the chance that a draft is accepted whose probability in q is of class c; the second row
        is for greedy requests.
    following: [2, C], the chance of the next draft, given that this one is accepted.
    """

    survival: Floats
    following: Floats
    least: float

    def after(self, survived: float, probability: float, greedy: bool) -> tuple[float, bool]:
        """The chance that all drafts, including one of this probability, are accepted, and whether to continue."""
        place = int(greedy), bisect(_EDGES, probability)
        survived *= float(self.survival[place])
        return survived, survived * float(self.following[place]) >= self.least


class Confidence:
    """Acceptance by class of a drafter's own probabilities; old rounds count less."""

    def __init__(self) -> None:
        beliefs = np.stack([_SURVIVAL, _FOLLOWING])  # [2, 2, C]
        self._weights = np.full_like(beliefs, _BELIEF)
        self._accepted = _BELIEF * beliefs

    def observe(self, greedy: bool, probabilities: Sequences[float], num_accepted: int) -> None:
        """Count a round: the drafter's probability of each draft, and how many drafts were accepted."""
        classes = [bisect(_EDGES, probability) for probability in probabilities[: num_accepted + 1]]
        for position, own in enumerate(classes):
            self._count((0, int(greedy), own), position < num_accepted)
            if position:
                self._count((1, int(greedy), classes[position - 1]), position < num_accepted)

    def rule(self, least: float) -> EarlyExit:
        """The rule from what is known now."""
        survival, following = self._accepted / self._weights
        return EarlyExit(survival, following, least)

    def _count(self, place: tuple[int, int, int], accepted: bool) -> None:
        self._weights[place] = _KEEP * self._weights[place] + 1
        self._accepted[place] = _KEEP * self._accepted[place] + accepted
