"""The self-checks of one engine's life: which draws count, what they come to, and when that is no accident any more."""

from collections import OrderedDict
from collections.abc import Sequence as Sequences
from random import Random

import numpy as np

from speculative.selfcheck.eprocess import STAKES, FreshStarts
from speculative.state.batch import Terms
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools
from speculative.stats import CHECKS, CheckState, CheckSums, StepStats

DELTA = 1e-6
"""Probability of a false alarm of one self-check over an engine's life."""

_CHOICE_SEED = 0  # of the steps that are checked: the same in every run of the same traffic
_MAX_SEEDS = 65536  # that are remembered


class SelfCheck:
    """Adds up the terms of every step, and alarms.

    Args:
        share: of the steps whose terms are taken. They are chosen at random: whatever recurs in a fixed rhythm, such as
            the probes of an adaptive draft length, would otherwise never be checked, or always.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self.reset()

    def reset(self) -> None:
        """Forget everything, also which seeds there were: what was drawn so far was not for users."""
        self._choice = Random(_CHOICE_SEED)
        self._seeds: OrderedDict[int, None] = OrderedDict()
        self._processes = {check: FreshStarts(DELTA) for check in CHECKS}
        self._sums = {check: CheckSums() for check in CHECKS}
        self._num_alarms = dict.fromkeys(CHECKS, 0)

    def admit(self, sequence: Sequence, stats: StepStats) -> None:
        """A request enters. One whose seed was there before repeats its random numbers: they would count twice."""
        seed = sequence.request.seed
        sequence.repeats_seed = seed in self._seeds
        stats.num_repeated_seeds += sequence.repeats_seed
        self._seeds[seed] = None
        self._seeds.move_to_end(seed)
        if len(self._seeds) > _MAX_SEEDS:
            self._seeds.popitem(last=False)

    def due(self) -> bool:
        """Whether the terms of the next step are taken: known before anything of it is drawn."""
        return self._choice.random() < self._share

    def counted(self, sequences: Sequences[Sequence]) -> Bools:
        """[E] whose terms count. Greedy ones draw nothing: all of their terms would be 0."""
        return np.array([not (seq.repeats_seed or seq.params.greedy) for seq in sequences])

    def take(self, terms: Terms, stats: StepStats) -> None:
        """Add a step's terms; `stats` counts them, and the alarms they raise."""
        stats.achievable_accepted += terms.achievable / self._share
        for check, row in zip(terms.checks, terms.sums, strict=True):
            num, positive, negative, square = row[len(STAKES) :].tolist()
            if num == 0:
                continue
            sums = CheckSums(int(num), positive, negative, square)
            stats.checks[check] = stats.checks.get(check, CheckSums()) + sums
            self._sums[check] += sums
            if self._processes[check].add(row[: len(STAKES)], int(num)):
                stats.alarms[check] = stats.alarms.get(check, 0) + 1
                self._num_alarms[check] += 1

    def restart(self) -> None:
        """Forget what the e-processes have won: after a fault was fixed they start again."""
        for process in self._processes.values():
            process.restart()

    def snapshot(self) -> tuple[CheckState, ...]:
        """How every self-check stands; any thread may ask."""
        return tuple(self._state(check) for check in CHECKS)

    def _state(self, check: str) -> CheckState:
        sums, (log_e, log_threshold) = self._sums[check], self._processes[check].leading()
        return CheckState(check, sums.num, sums.mean, sums.z, log_e, log_threshold, self._num_alarms[check])
