"""How often drafts are accepted, by their position."""

import math
from collections.abc import Sequence as Sequences

_BELIEF = 16.0
_HOPE = 0.25  # standard errors


class AcceptanceRates:
    """The share of drafts accepted at each position of a draft, of those that were reached; old rounds count less.

    Args:
        num_positions: length of the longest draft.
        keep: what is left of a round's weight when the next comes.
        expected: rates of the first positions, as if `_BELIEF` rounds had shown them.
    """

    def __init__(self, num_positions: int, keep: float, expected: Sequences[float] = ()) -> None:
        self._keep = keep
        unknown = [0.0] * (num_positions - len(expected))
        self._reached = ([_BELIEF] * len(expected) + unknown)[:num_positions]
        self._accepted = [_BELIEF * rate for rate in expected[:num_positions]] + unknown

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count a round: the positions up to the first that was not accepted."""
        for position in range(min(num_accepted + 1, num_drafted)):
            self._reached[position] = self._keep * self._reached[position] + 1
            self._accepted[position] = self._keep * self._accepted[position] + (position < num_accepted)

    def blended(self, prior: Sequences[float] | None = None) -> list[float]:
        """The rate at each position, drawn towards `prior` while little is known; or else to that before it."""
        rates: list[float] = []
        for position, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            if prior is not None:
                expected, weight = prior[position], 20.0
            else:
                expected, weight = (rates[-1] if rates else 0.6), 2.0
            rates.append((accepted + weight * expected) / (reached + weight))
        return rates

    def hoped_for(self) -> list[float]:
        """The rates, each higher by a part of its standard error: a length that might pay is tried for a while."""
        known = zip(self.blended(), self._reached, strict=True)
        return [min(1.0, rate + _HOPE * math.sqrt(rate * (1 - rate) / (reached + 2))) for rate, reached in known]
