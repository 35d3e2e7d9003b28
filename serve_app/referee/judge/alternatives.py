"""Logprobs that are reported beside each token's own: of the likeliest tokens in its place, and of a request's ids."""

from dataclasses import dataclass, field
from typing import NamedTuple

MOST_ALTERNATIVES = 16_384
"""Numbers that are kept of one answer and its prompt. Of more, every second place is left out, or every fourth, and so
on."""


class Alternatives(NamedTuple):
    """Logprobs that were reported in one place. Pairs of a token id and its logprob, nats."""

    place: int  # the index of the place's own token in prompt and answer
    top: tuple[tuple[int, float], ...] = ()  # the likeliest first
    scored: tuple[tuple[int, float], ...] = ()  # of the ids that the request names

    @property
    def pairs(self) -> tuple[tuple[int, float], ...]:
        """Return all reported alternatives."""
        return (*self.top, *self.scored)


@dataclass(slots=True)
class KeptAlternatives:
    """Alternatives of one answer while it grows."""

    most: int = MOST_ALTERNATIVES
    kept: list[Alternatives] = field(default_factory=list)
    num_left_out: int = 0  # numbers that were reported and are not kept
    _every: int = 1
    _num_kept: int = 0

    def add(self, one: Alternatives) -> None:
        """Add what was reported in the next place."""
        if one.place % self._every:
            self.num_left_out += len(one.pairs)
            return
        self.kept.append(one)
        self._num_kept += len(one.pairs)
        while self._num_kept > self.most and len(self.kept) > 1:
            self._every *= 2
            left_out = sum(len(one.pairs) for one in self.kept if one.place % self._every)
            if left_out:
                self.kept = [one for one in self.kept if one.place % self._every == 0]
                self.num_left_out += left_out
                self._num_kept -= left_out


@dataclass(frozen=True, slots=True)
class AlternativesFound:
    """The result of comparing one answer's.

    num_left_out: those that were reported and not compared, since there were too many, or since the replay knows
        nothing of their tokens.
    """

    num_compared: int = 0  # numbers
    num_left_out: int = 0
    max_drift_nats: float | None = None  # the largest |served - replayed|; None = none was compared


NOTHING_COMPARED = AlternativesFound()
