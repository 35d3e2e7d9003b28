"""Acceptance rates of drafts, by their position, and what further candidates for a position add to them."""

import math
from collections.abc import Sequence as Sequences

_BELIEF = 16.0
_BELIEF_OF_REQUEST = 20.0
_BELIEF_OF_UNKNOWN = 2.0
_HOPE = 0.25  # standard errors
_KEEP = 0.998  # of what siblings showed, a round later
_UNKNOWN = 0.6
_MISSED_BY_TWICE = 0.77  # share of the tokens missed by k candidates that 2k miss, too; measured for k = 1, 2 and 4


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
            self.observe_at(position, accepted=position < num_accepted)

    def observe_at(self, position: int, *, accepted: bool) -> None:
        """Count a position that a round reached."""
        self._reached[position] = self._keep * self._reached[position] + 1
        self._accepted[position] = self._keep * self._accepted[position] + accepted

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


class Siblings:
    """The share of tokens that further candidates for a position miss, of those that the first ones miss.

    What was seen counts less with each round, whether that shows more or not: a round with few candidates tells
    nothing of further ones, and the text may have changed meanwhile.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}  # by both numbers: missed by few; by many, too

    def begin_round(self) -> None:
        """Let what was seen count less."""
        self._seen = {numbers: (_KEEP * few, _KEEP * many) for numbers, (few, many) in self._seen.items()}

    def observe(self, few: int, many: int, *, missed: bool) -> None:
        """Count a token that `few` candidates missed. missed: whether `many` missed it, too."""
        missed_by_few, missed_by_many = self._seen.get((few, many), (0.0, 0.0))
        self._seen[few, many] = missed_by_few + 1, missed_by_many + missed

    def missed(self, few: int, many: int) -> float:
        """The share that is missed; less by a part of its standard error: what might pay is tried for a while."""
        missed_by_few, missed_by_many = self._seen.get((few, many), (0.0, 0.0))
        weight, expected = missed_by_few + _BELIEF, math.pow(_MISSED_BY_TWICE, math.log2(many / few))
        share = (missed_by_many + _BELIEF * expected) / weight
        return max(0.0, share - _HOPE * math.sqrt(share * (1 - share) / weight))
