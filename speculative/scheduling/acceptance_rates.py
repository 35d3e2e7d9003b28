"""Acceptance rates of drafts, by their position."""

import math
from collections.abc import Sequence as Sequences

_BELIEF = 16.0
_BELIEF_OF_REQUEST = 20.0
_BELIEF_OF_UNKNOWN = 2.0
_HOPE = 0.25  # standard errors
_UNKNOWN = 0.6


class AcceptanceRates:
    """The share of drafts accepted at each position of a draft, of those that were reached; old rounds count less.

    What is believed of a position while little is known of it follows the position before: where that is accepted less
    often than was expected, so will this one be.

    Args:
        num_positions: length of the longest draft.
        keep: what is left of a round's weight when the next comes.
        expected: rates of the first positions, as if `_BELIEF` rounds had shown them.
    """

    def __init__(self, num_positions: int, keep: float, expected: Sequences[float] = ()) -> None:
        self._keep = keep
        self._expected = expected[:num_positions]
        self._reached = [0.0] * num_positions
        self._accepted = [0.0] * num_positions

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count a round: the positions up to the first that was not accepted."""
        for position in range(min(num_accepted + 1, num_drafted)):
            self._reached[position] = self._keep * self._reached[position] + 1
            self._accepted[position] = self._keep * self._accepted[position] + (position < num_accepted)

    def blended(self, prior: Sequences[float] | None = None) -> list[float]:
        """The rate at each position, drawn towards `prior`, or else what was expected, while little is known."""
        expected, belief = (self._expected, _BELIEF) if prior is None else (prior, _BELIEF_OF_REQUEST)
        rates: list[float] = []
        ratio = 1.0
        for position, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            if position < len(expected):
                believed, weight = min(1.0, expected[position] * ratio), belief
            else:
                believed, weight = (rates[-1] if rates else _UNKNOWN), _BELIEF_OF_UNKNOWN
            rates.append((accepted + weight * believed) / (reached + weight))
            ratio = rates[-1] / max(expected[position], 0.01) if position < len(expected) else 1.0
        return rates

    def hoped_for(self) -> list[float]:
        """The rates, each higher by a part of its standard error: a length that might pay is tried for a while."""
        beliefs = [_BELIEF] * len(self._expected) + [_BELIEF_OF_UNKNOWN] * len(self._reached)
        known = zip(self.blended(), self._reached, beliefs, strict=False)
        return [
            min(1.0, rate + _HOPE * math.sqrt(rate * (1 - rate) / (reached + belief)))
            for rate, reached, belief in known
        ]
