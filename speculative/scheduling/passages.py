"""Passages that a sequence repeats: of its prompt, of itself, of earlier outputs. A model need not draft those.

How far a passage goes on as before is estimated from the passages that were drafted, by how many tokens had matched: a
long match is seldom an accident (Oliaro et al., "SuffixDecoding", arXiv 2411.04975, weighs its matches likewise).
"""

from bisect import bisect
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from speculative.lookup.suffix import SuffixDrafter, SuffixOptions
from speculative.scheduling.acceptance_rates import AcceptanceRates
from speculative.state.batch import SequenceResult
from speculative.state.sequence import Sequence

_EDGES = (4, 8, 16)  # between classes of matched tokens
_EXPECTED = (0.4, 0.6, 0.8, 0.9)  # acceptance of each draft, by class, before any was seen


@dataclass(slots=True)
class _Passage:
    tokens: list[int]
    rates: AcceptanceRates  # of its class


class Passages:
    """What is repeated in the step that is planned.

    Args:
        options: how passages are found.
        max_drafts: tokens of a passage that are drafted.
    """

    def __init__(self, options: SuffixOptions, max_drafts: int) -> None:
        self._options, self._max_drafts = options, max_drafts
        self.restart()

    def restart(self) -> None:
        """Forget all that was seen."""
        self._suffix = SuffixDrafter(self._options, self._max_drafts)
        self._rates = [AcceptanceRates(self._max_drafts, keep=0.998, expected=(rate,)) for rate in _EXPECTED]
        self._chosen: dict[str, _Passage] = {}

    def begin_step(self) -> None:
        """Nothing is repeated, until it is chosen."""
        self._chosen.clear()

    def find(self, sequence: Sequence) -> list[float]:
        """The chance, for each token of the longest known continuation, that all up to it will be accepted."""
        tokens, num_matched = self._suffix.find(sequence, self._max_drafts)
        if not tokens:
            return []
        rates = self._rates[bisect(_EDGES, num_matched)]
        self._chosen[sequence.request.request_id] = _Passage(tokens, rates)
        return list(accumulate(rates.hoped_for()[: len(tokens)], mul))

    def make_up(self, sequence: Sequence, *, halved: bool) -> None:
        """Draft as many tokens as may be, or half as many, whatever they are: to see what that costs."""
        count = -(-self._max_drafts // 2) if halved else self._max_drafts
        unused = AcceptanceRates(self._max_drafts, keep=1.0)
        self._chosen[sequence.request.request_id] = _Passage(sequence.tokens[-1:] * count, unused)

    def choose(self, sequence: Sequence, count: int) -> None:
        """Draft so many tokens of what was found; 0 = none."""
        if count:
            del self._chosen[sequence.request.request_id].tokens[count:]
        else:
            del self._chosen[sequence.request.request_id]

    def of(self, sequence: Sequence) -> list[int]:
        """What is drafted for a sequence; [] where nothing was chosen."""
        passage = self._chosen.get(sequence.request.request_id)
        return [] if passage is None else passage.tokens

    def observe(self, sequence: Sequence, result: SequenceResult) -> bool:
        """Learn from a round, if a passage was drafted in it; else False."""
        passage = self._chosen.get(sequence.request.request_id)
        if passage is not None:
            passage.rates.observe(result.num_drafted, result.num_accepted)
        return passage is not None

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left, and remember what it wrote."""
        self._chosen.pop(request_id, None)
        self._suffix.forget(request_id)


def best_count(chances: Sequences[float], tokens: float, seconds: Sequences[float]) -> tuple[int, float]:
    """How many drafts of a passage give the most tokens a second, and how many tokens that are.

    Args:
        chances: as `Passages.find` returns them.
        tokens: of the step without them.
        seconds: of the step with 1, 2, ... of them.
    """
    expected = [tokens + gained for gained in accumulate(chances)]
    best = max(range(len(chances)), key=lambda place: expected[place] / seconds[place])
    return best + 1, expected[best]
