"""Passages that a sequence repeats: of its prompt or of itself. A model need not draft those.

How far a passage goes on as before is estimated from the passages that were drafted, by how many tokens had matched: a
long match is seldom an accident (Oliaro et al., "SuffixDecoding", arXiv 2411.04975, weighs its matches likewise). Then
by what the request itself has made of its passages: one copies, another only resembles.
"""

from bisect import bisect
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from speculative.lookup.ngram import NgramDrafter, NgramOptions
from speculative.scheduling.acceptance_rates import AcceptanceRates
from speculative.state.batch import SequenceResult
from speculative.state.sequence import Sequence

_MATCHED = NgramOptions(ngram_min=4, ngram_max=32)  # tokens that are the same before a passage
_EDGES = (8, 16)  # between classes of them
_EXPECTED = (0.6, 0.8, 0.9)  # acceptance of each draft, by class, before any was seen
_BELIEF = 4.0  # expected tokens that a request begins with, of which as many were accepted as of others' lately
_KEEP = 0.98  # of what a request has shown, each time it repeats something
_KEEP_OF_ALL = 0.998
_LEAST_TRUST = 0.25
_TRIED = 4  # sequences that get a made-up passage at once


class Passage(NamedTuple):
    """How a passage goes on."""

    tokens: list[int]
    chances: list[float]  # for each token, that all up to it will be accepted


@dataclass(slots=True)
class _Record:
    """The number of drafts of passages that were accepted, and that was expected to be."""

    accepted: float = 0.0
    expected: float = 0.0

    def fade(self, keep: float) -> None:
        """Let what was seen count less."""
        self.accepted, self.expected = keep * self.accepted, keep * self.expected

    def trust(self, prior: float = 1.0) -> float:
        """Return what chances are multiplied by."""
        return min(1.0, (_BELIEF * prior + self.accepted) / (_BELIEF + self.expected))


@dataclass
class Passages:
    """Passages that are repeated in the step that is planned."""

    max_drafts: int  # tokens of a passage that are drafted; 0 = nothing ever is

    def __post_init__(self) -> None:
        self.restart()

    @property
    def num_trials(self) -> int:
        """In how many ways `make_up` makes up passages."""
        return 2 if self.max_drafts else 0

    def restart(self) -> None:
        """Forget all that was seen."""
        self._lookup = NgramDrafter(_MATCHED, self.max_drafts)
        self._rates = [AcceptanceRates(self.max_drafts, keep=0.998, expected=(rate,)) for rate in _EXPECTED]
        self._found: dict[str, AcceptanceRates] = {}  # of the class of what each request repeats
        self._records: dict[str, _Record] = {}
        self._all = _Record()

    def find(self, sequence: Sequence) -> Passage | None:
        """Find the longest known continuation; none where passages have been accepted too seldom, until that is long
        ago."""
        tokens, num_matched = self._lookup.find(sequence, self.max_drafts) if self.max_drafts else ([], 0)
        if not tokens:
            return None
        request_id = sequence.request.request_id
        record = self._records.setdefault(request_id, _Record())
        record.fade(_KEEP)
        self._all.fade(_KEEP_OF_ALL)
        trust = record.trust(self._all.trust())
        if trust <= _LEAST_TRUST:
            return None
        rates = self._found[request_id] = self._rates[bisect(_EDGES, num_matched)]
        return Passage(tokens, [trust * chance for chance in accumulate(rates.hoped_for()[: len(tokens)], mul)])

    def make_up(self, sequences: Sequences[Sequence], trial: int) -> dict[str, list[int]]:
        """Return whatever it is, by request, to see what that costs: all that one passage may have, or half of it for
        several."""
        owners, count = (1, self.max_drafts) if trial == 0 else (_TRIED, -(-self.max_drafts // 2))
        return {sequence.request.request_id: sequence.tokens[-1:] * count for sequence in sequences[:owners]}

    def observe(self, sequence: Sequence, result: SequenceResult) -> None:
        """Learn from a round in which a passage was drafted, or as much of it as there was room for."""
        rates = self._found.pop(sequence.request.request_id, None)
        if rates is None:  # it was made up
            return
        expected = sum(accumulate(rates.blended()[: result.num_drafted], mul))
        rates.observe([True] * result.num_accepted + [False] * (result.num_accepted < result.num_drafted))
        for record in (self._records.setdefault(sequence.request.request_id, _Record()), self._all):
            record.accepted += result.num_accepted
            record.expected += expected

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
        self._found.pop(request_id, None)
        self._records.pop(request_id, None)
        self._lookup.forget(request_id)


def best_count(chances: Sequences[float], tokens: float, seconds: Sequences[float]) -> tuple[int, float]:
    """Return how many drafts of a passage give the most tokens a second, and how many tokens that are.

    Args:
        chances: as `Passages.find` returns them.
        tokens: of the step without them.
        seconds: of the step with 1, 2, ... of them.
    """
    expected = [tokens + gained for gained in accumulate(chances)]
    best = max(range(len(chances)), key=lambda place: expected[place] / seconds[place])
    return best + 1, expected[best]
