"""The share of drafts that were accepted, by place; old rounds count less."""

import math
from collections.abc import Sequence as Sequences
from itertools import zip_longest

_BELIEF = 16.0  # rounds that expected rates count as
_BELIEF_OF_REQUEST = 20.0  # rounds that the rates of all requests count as, for one of them
_BELIEF_OF_UNKNOWN = 2.0
_HOPE = 0.25  # standard errors
_UNKNOWN = 0.6


class AcceptanceRates:
    """The share of drafts accepted at each place, of those that were reached.

    What is believed of a place while little is known of it follows the place before: where that is accepted less often
    than was expected, so will this one be.

    Args:
        num_places: positions of the longest draft.
        keep: what is left of a round's weight when the next comes, whether that reaches the place or not.
        expected: rates of the first places, as if `_BELIEF` rounds had shown them.
    """

    def __init__(self, num_places: int, keep: float, expected: Sequences[float] = ()) -> None:
        self._keep = keep
        self._expected = expected[:num_places]
        self._reached = [0.0] * num_places
        self._accepted = [0.0] * num_places

    def observe(self, hits: Sequences[bool]) -> None:
        """Count a round: whether the draft at each place that was reached was accepted."""
        self._reached = [self._keep * count for count in self._reached]
        self._accepted = [self._keep * count for count in self._accepted]
        for place, hit in enumerate(hits):
            self._reached[place] += 1
            self._accepted[place] += hit

    def blended(self, prior: Sequences[float] | None = None) -> list[float]:
        """The rate at each place, drawn towards `prior`, or else what was expected, while little is known."""
        expected, belief = (self._expected, _BELIEF) if prior is None else (prior, _BELIEF_OF_REQUEST)
        rates: list[float] = []
        ratio = 1.0
        for reached, accepted, own in zip_longest(self._reached, self._accepted, expected):
            if own is None:
                believed, weight = (rates[-1] if rates else _UNKNOWN), _BELIEF_OF_UNKNOWN
            else:
                believed, weight = min(1.0, own * ratio), belief
            rates.append((accepted + weight * believed) / (reached + weight))
            ratio = 1.0 if own is None else rates[-1] / max(own, 0.01)
        return rates

    def hoped_for(self) -> list[float]:
        """The rates, each higher by a part of its standard error: a length that might pay is tried for a while."""
        beliefs = [_BELIEF] * len(self._expected) + [_BELIEF_OF_UNKNOWN] * len(self._reached)
        known = zip(self.blended(), self._reached, beliefs, strict=False)
        return [min(1.0, rate + _HOPE * math.sqrt(rate * (1 - rate) / (seen + belief))) for rate, seen, belief in known]
