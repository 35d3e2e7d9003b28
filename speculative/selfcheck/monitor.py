"""The self-checks of one engine's life: which draws count, what they come to, and when that is no accident any more."""

import time
from collections import OrderedDict
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np

from speculative.sampling.rng import Float64s
from speculative.selfcheck.eprocess import STAKES, FreshStarts
from speculative.state.batch import Entry, Terms
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools
from speculative.stats import CHECKS, CheckState, CheckSums, StepStats

DELTA = 1e-6
"""Probability of a false alarm of one self-check over an engine's life."""

_CHOICE_SEED = 0  # of the steps that are checked: the same in every run of the same traffic
_MAX_SEEDS = 65536  # that are remembered
_MAX_SPANS = 32  # of one seed


def _no_signs() -> Float64s:
    return np.zeros((2, 65))


@dataclass(slots=True, eq=False)
class _Use:
    """The positions whose random numbers one sequence uses: from where it began to `end`, or as long as it is now.

    last_signs: of its last checked round, as in `with_round_terms`.
    """

    sequence: Sequence
    begin: int
    end: int = 0
    last_signs: Float64s = field(default_factory=_no_signs)

    def span(self) -> tuple[int, int]:
        return self.begin, max(self.end, len(self.sequence.tokens))


@dataclass(slots=True)
class _Seed:
    """The users of one seed's random numbers: spans of positions of those that are gone, and those that are here."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    uses: list[_Use] = field(default_factory=list)

    def is_fresh(self, own: _Use, begin: int, end: int) -> bool:
        """Return whether nobody else used the random numbers of these positions."""
        others = (*self.spans, *(use.span() for use in self.uses if use is not own))
        return all(end <= first or last <= begin for first, last in others)

    def close(self, own: _Use) -> None:
        """A sequence is gone. Of too many spans the nearest two become one, with what lies between them."""
        self.uses.remove(own)
        spans: list[tuple[int, int]] = []
        for begin, end in sorted([*self.spans, own.span()]):
            if spans and begin <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((begin, end))
        self.spans = spans
        if len(spans) > _MAX_SPANS:
            gaps = [after[0] - before[1] for before, after in pairwise(spans)]
            nearest = gaps.index(min(gaps))
            spans[nearest : nearest + 2] = [(spans[nearest][0], spans[nearest + 1][1])]


class SelfCheck:
    """Adds up the terms of every step, and alarms.

    Args:
        share: of the steps whose terms are taken. They are chosen at random: whatever recurs in a fixed rhythm, such as
            the probes of an adaptive draft length, would otherwise never be checked, or always.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._run = max(1, int(1 / share)) if share > 0 else 1
        self.reset()

    def reset(self) -> None:
        """Forget everything, also which seeds there were: what was drawn so far was not for users."""
        self._choice, self._num_left, self._due_at = Random(_CHOICE_SEED), 0, 0
        self._seeds: OrderedDict[int, _Seed] = OrderedDict()
        self._uses: dict[str, _Use] = {}  # by request
        self._num_rounds = self._num_untested = 0  # since the last terms
        self._processes = {check: FreshStarts(DELTA) for check in CHECKS}
        self._sums = {check: CheckSums() for check in CHECKS}
        self._num_alarms = dict.fromkeys(CHECKS, 0)

    def admit(self, sequence: Sequence, stats: StepStats) -> None:
        """A request enters; what was drawn for it before, elsewhere, this engine did not see."""
        seed = sequence.request.seed
        stats.num_repeated_seeds += seed in self._seeds
        use = self._uses[sequence.request.request_id] = _Use(sequence, len(sequence.tokens))
        self._seeds.setdefault(seed, _Seed()).uses.append(use)
        self._seeds.move_to_end(seed)
        if len(self._seeds) > _MAX_SEEDS:
            self._seeds.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """A request is gone; the positions that it used remain."""
        use = self._uses.pop(request_id, None)
        of_seed = None if use is None else self._seeds.get(use.sequence.request.seed)
        if use is not None and of_seed is not None and use in of_seed.uses:
            of_seed.close(use)

    def due(self) -> bool:
        """Return whether the terms of the next step are taken: known before anything of it is drawn.

        At most one step of each run of 1 / share is, so that none waits long; which one is chosen at random.
        """
        if self._num_left == 0:
            self._num_left = self._run
            is_one = self._choice.random() < self._share * self._run
            self._due_at = self._choice.randrange(self._run) if is_one else self._run
        self._num_left -= 1
        return self._num_left == self._due_at

    def counted(self, entries: Sequences[Entry], *, checked: bool = True) -> Bools:
        """[E] whose terms count: none in a step whose terms are not taken.

        Greedy ones draw nothing: all of their terms would be 0. And a round counts only if nobody chose its random
        numbers, and nobody else used them before: they are a function of (seed, position), so those of another request
        with the same seed are independent of the past where it stands at other positions, and only there.
        """
        counted = np.zeros(len(entries), np.bool_)
        for index, entry in enumerate(entries if checked else ()):
            sequence = entry.sequence
            if sequence.params.greedy:
                continue
            own, of_seed = self._uses.get(sequence.request.request_id), self._seeds.get(sequence.request.seed)
            self._num_rounds += 1
            begin = len(sequence.tokens)
            end = begin + 1 + entry.max_drafts
            chosen = sequence.request.chosen_seed
            fresh = own is not None and of_seed is not None and not chosen and of_seed.is_fresh(own, begin, end)
            if own is not None:
                own.end = end
            self._num_untested += not fresh
            counted[index] = fresh
        return counted

    def last_signs(self, entries: Sequences[Entry]) -> list[Float64s]:
        """Per entry, the signs that `with_round_terms` reads and replaces; none of a request that was never admitted
        are kept, and its terms do not count."""
        uses = [self._uses.get(entry.sequence.request.request_id) for entry in entries]
        return [_no_signs() if use is None else use.last_signs for use in uses]

    def take(self, terms: Terms, stats: StepStats) -> None:
        """Add a step's terms; `stats` counts them, and the alarms they raise."""
        now = time.time()
        stats.num_checked_rounds += self._num_rounds
        stats.num_untested_rounds += self._num_untested
        self._num_rounds = self._num_untested = 0
        stats.achievable_accepted += terms.achievable / self._share
        for check, row in zip(terms.checks, terms.sums, strict=True):
            num, positive, negative, square = row[len(STAKES) :].tolist()
            if num == 0:
                continue
            sums = CheckSums(int(num), positive, negative, square)
            stats.checks[check] = stats.checks.get(check, CheckSums()) + sums
            self._sums[check] += sums
            if self._processes[check].add(row[: len(STAKES)], int(num), now):
                stats.alarms[check] = stats.alarms.get(check, 0) + 1
                self._num_alarms[check] += 1

    def restart(self) -> None:
        """Forget what the e-processes have won: after a fault was fixed they start again."""
        for process in self._processes.values():
            process.restart()

    def snapshot(self) -> tuple[CheckState, ...]:
        """Return how every self-check stands; any thread may ask."""
        states = []
        for check in CHECKS:
            sums, process = self._sums[check], self._processes[check]
            reached = (*process.leading(), self._num_alarms[check], process.evidence_since)
            states.append(CheckState(check, sums.num, sums.mean, sums.z, *reached))
        return tuple(states)
