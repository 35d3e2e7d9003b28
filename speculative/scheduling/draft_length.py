"""The number of tokens to draft: fixed, or as many as pay.

Source of the rule: Liu et al., "Optimizing Speculative Decoding for Serving LLMs Using Goodput" (arXiv 2406.14066): of
all draft lengths of a batch, choose those with the most expected tokens a second. Expected tokens come from measured
acceptance rates, seconds from timed steps.

A round's plan depends on earlier rounds and on the clock, never on the random numbers of the round itself, so it
changes no distribution. It does change where rounds begin, and so which text a seed gives, unless the request is
reproducible. (Requests with the same seed share random numbers, as they do without any drafts.)"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, mul, truediv
from typing import NamedTuple

from speculative.config import DrafterConfig
from speculative.scheduling.acceptance_rates import AcceptanceRates, Siblings
from speculative.scheduling.passages import Passages, best_count
from speculative.scheduling.step_cost import StepCost, Work
from speculative.state.batch import Entry, SequenceResult
from speculative.state.draft_tree import DraftTree, narrowed, rows_of_levels
from speculative.state.sequence import Sequence

_CALIBRATE_EVERY = 8  # of such steps, where half or twice the load is known: what it costs there is believed first
_PLAIN_FIRST = 5  # steps without drafts where half or twice the load is known: what all gains are compared with
_PROBE_EVERY = 100  # steps
_LOOK_EVERY = {True: 4, False: 8}  # steps, while drafting pays and while it does not: in a cold cache looking takes 3 %
_MOST_PATIENCE = 2  # factor by which probes become rarer while they show that drafting does not pay
_SEQUENCES_A_PROBE = 4  # those whose drafter is least behind: it has to catch up on what was emitted without it
_CLEAR_GAIN = 1.05  # in tokens a second, for which a passage is drafted: what is expected of it is less certain
_HYSTERESIS = 0.01  # gain in tokens a second for which drafting is switched on or off
_MOST_BEHIND = 512  # tokens; of longer prompts a drafter computes the rest while the target does


ExpectedRates = tuple[Sequences[float], Sequences[float]]
"""The share of drafts accepted at each position: of sampled drafts, and of greedy requests' ones."""


class DraftLength:
    """Decides how many tokens may be drafted for each sequence; unless a method is overridden, as many as wanted.

    most_candidates: of a tree for each position of the planned step; None = as many as configured.
    """

    most_candidates: int | None = None

    def plan(self, decoding: Sequences[Sequence]) -> None:
        """Plan for all sequences of the next step together."""

    def max_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Return how many drafts this one gets, at most `wanted`; 0 leaves the drafter alone."""
        del sequence
        return wanted

    def repeated(self, sequence: Sequence) -> list[int]:
        """Return what is drafted in a model's place: how a passage goes on that is being repeated; [] = the model
        drafts."""
        del sequence
        return []

    def rows(self, sequence: Sequence, wanted: int, widths: tuple[int, ...]) -> Sequences[int]:
        """Return how many rows this one's 0, 1, ... `wanted` drafts take, one behind the other with all their siblings.
        widths: candidates for each position, as configured."""
        return range(wanted + 1) if self.repeated(sequence) else rows_of_levels(narrowed(widths, self.most_candidates))

    def grown(self, sequence: Sequence, tree: DraftTree, drafts: Sequences[int]) -> None:
        """Record a sequence's tree, and the drafts of its nodes."""

    def observe(
        self,
        entries: Sequences[Entry],
        results: Sequences[SequenceResult],
        step_s: float,
        longest: int | None = None,
    ) -> None:
        """Learn from a step's results, and from the seconds that drafting and verifying took. `longest`: drafts that a
        model made for one sequence, where they were not those verified in the step."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""

    def take_speculated_s(self) -> tuple[float, float]:
        """Seconds of steps that decoded with drafts since the last call, and what their tokens would have taken without
        any, as far as that is known."""
        return 0.0, 0.0

    def knows_cost(self, num_sequences: int) -> bool:
        """Return whether it has seen enough steps with about this many sequences."""
        del num_sequences
        return True

    def begin_trial(self) -> None:
        """Until `restart`, all steps serve to learn what steps cost."""

    def restart(self, expected: ExpectedRates | None = None) -> None:
        """Forget how often drafts were accepted, but not what steps cost; `expected` replaces what is believed at
        first."""


class DynamicLength(DraftLength):
    """The number of drafts that gives the most tokens a second, for each sequence of a batch.

    Where drafting does not pay, it stops. One step in one or two hundred then still drafts a little for a few sequences
    to see whether that still holds; where drafting pays, one in a hundred tries none at all, or all for a few.
    The steps are chosen by counting.

    Trees are as wide as pays, too: a round with many candidates shows how often fewer would have done. What further
    candidates add is learned apart from how often the first is right, which every round shows.

    Args:
        most: tokens that a drafter makes for a sequence.
        most_repeated: tokens of a repeated passage that are drafted in a model's place where they promise more.
        widths: candidates for each position where drafts are trees.
    """

    def __init__(self, most: int, most_repeated: int = 0, widths: tuple[int, ...] = ()) -> None:
        self._most, self._passages = most, Passages(most_repeated)
        self._shapes = _shapes_of(widths or (1,) * most)
        self._costs: dict[int, StepCost] = {}  # by the number of binary digits of the number of sequences
        self._expected_rates: ExpectedRates = (), ()
        self.restart()

    def restart(self, expected: ExpectedRates | None = None) -> None:
        """Implement `DraftLength.restart`."""
        self._passages.restart()
        self._expected_rates = self._expected_rates if expected is None else expected
        # Of sampled drafts and of greedy requests' ones, which differ. Rates: of first candidates.
        self._rates = [AcceptanceRates(self._most, keep=0.998, expected=rates) for rates in self._expected_rates]
        self._siblings = [Siblings() for _ in range(2)]
        self._shape = self._next_shape = len(self._shapes) - 1  # the best so far; the one of the planned step
        self._num_compared = 0
        self._requests: dict[str, _RequestHistory] = {}
        self._unread: list[_Step] = []
        self._trees: dict[str, _Grown] = {}
        self._lengths: dict[str, int] = {}
        self._decoding: list[Sequence] = []
        self._is_kept = False  # whether the lengths hold for further steps of the same sequences
        self._speculating: list[Sequence] = []
        self._num_kept, self._may_repeat = 0, False  # steps since the last look; whether passages are looked for
        self._is_trial = False
        self._num_steps, self._num_calibrations = 0, 0
        self._drafting = True
        self._speculated_s = self._plain_s = 0.0
        self._probed_at, self._num_probes, self._patience = 0, 0, 1

    def begin_trial(self) -> None:
        """Implement `DraftLength.begin_trial`."""
        self._is_trial = True

    def knows_cost(self, num_sequences: int) -> bool:
        """Implement `DraftLength.knows_cost`."""
        return self._cost(num_sequences).is_known

    def plan(self, decoding: Sequences[Sequence]) -> None:
        """Choose the lengths of the next step for all decoding sequences; for the same ones, those of the last step,
        if that was planned lately."""
        self._passages.begin_step()
        self._num_steps += 1
        self._num_kept += 1
        if not self._is_kept or self._num_kept >= _LOOK_EVERY[self._drafting] or decoding != self._decoding:
            self._look(decoding)
        if self._may_repeat:
            self._repeat(self._speculating)

    def _look(self, decoding: Sequences[Sequence]) -> None:
        """Learn from the steps since the last look, then plan."""
        self._learn()
        speculating = [sequence for sequence in decoding if sequence.params.speculate]
        for sequence in speculating:
            if sequence.request.request_id not in self._requests:
                rates = AcceptanceRates(self._most, keep=0.97)
                self._requests[sequence.request.request_id] = _RequestHistory(rates)
        self._decoding, self._speculating = list(decoding), speculating
        self._num_kept, self._is_kept, self._may_repeat = 0, False, False
        if not speculating:
            return
        cost = self._cost(len(self._decoding))
        all_lengths = self._is_trial or not cost.is_borrowed or self._num_steps % _CALIBRATE_EVERY == 0
        if not cost.is_known and all_lengths:
            lengths = self._calibrate(speculating)
        elif not cost.is_known and cost.num_plain < _PLAIN_FIRST:
            cost.num_plain += 1
            lengths = [0] * len(speculating)
        else:
            lengths = self._best_lengths(speculating, cost)
            self._next_shape = self._shape
            if not self._probe(speculating, lengths):
                self._is_kept, self._may_repeat = cost.is_known, self._passages.max_drafts > 0
        self._lengths = {seq.request.request_id: length for seq, length in zip(speculating, lengths, strict=True)}

    @property
    def most_candidates(self) -> int | None:  # type: ignore[override]
        """Implement `DraftLength.most_candidates`."""
        return self._shapes[self._next_shape].most_candidates

    def max_drafts(self, sequence: Sequence, wanted: int) -> int:
        """The planned length, at most `wanted`."""
        planned = self._lengths.get(sequence.request.request_id, self._most)
        return min(wanted, len(self.repeated(sequence)) or planned)

    def repeated(self, sequence: Sequence) -> list[int]:
        """Implement `DraftLength.repeated`."""
        return self._passages.of(sequence)

    def grown(self, sequence: Sequence, tree: DraftTree, drafts: Sequences[int]) -> None:
        """Keep them until it is known which drafts were accepted."""
        if len(self._shapes) > 1:
            self._trees[sequence.request.request_id] = tree, drafts

    def observe(
        self,
        entries: Sequences[Entry],
        results: Sequences[SequenceResult],
        step_s: float,
        longest: int | None = None,
    ) -> None:
        """Keep the step for the next look: at every step, learning would find all caches cold."""
        if self._drafting or not self._num_kept or self._passages.any_chosen:
            starts = [len(entry.sequence.tokens) for entry in entries]
            drafts = self._passages.any_chosen, self._next_shape, self._trees
            self._unread.append(_Step(entries, results, starts, step_s, longest, *drafts))
            self._trees = {}
        if self._passages.any_chosen:
            self._learn()

    def _learn(self) -> None:
        """Count what was accepted, and what steps took that only decoded."""
        steps, self._unread = self._unread, []
        for step in steps:
            missed, num_drafts, comparable, catches_up = 0, 0, True, False
            counts = []
            for entry, result, start in zip(step.entries, step.results, step.starts, strict=True):
                comparable &= entry.samples and entry.num_known == 1
                history = self._requests.get(entry.sequence.request.request_id)
                if history is None or result.fault is not None or result.num_drafted == 0:
                    continue
                if step.repeats and self._passages.observe(entry.sequence, result):
                    num_drafts += result.num_drafted
                    continue
                num_drafts += self._shapes[step.shape].rows[min(result.num_drafted, self._most)]
                counts.append(result.num_drafted)
                rates = history.rates, self._rates[entry.sequence.params.greedy]
                if len(self._shapes) > 1:
                    self._siblings[entry.sequence.params.greedy].begin_round()
                if step.shape:
                    self._observe_tree(entry, step, result, rates)
                else:
                    for own in rates:
                        own.observe(result.num_drafted, result.num_accepted)
                catches_up |= history.drafted_at is None
                missed += history.num_missed(start, self._most)
                history.drafted_at = start
            if not comparable or not step.entries:
                continue
            cost = self._cost(len(step.entries))
            longest = max(counts, default=0) if step.longest is None else step.longest
            work = Work(len(step.entries), num_drafts, longest, sum(step.starts), missed)
            if num_drafts and cost.is_known and not self._is_trial:
                counted_s, plain_s = cost.with_and_without_drafts(work, step.seconds)
                num_tokens = sum(result.num_accepted + 1 for result in step.results)
                self._speculated_s += counted_s
                self._plain_s += plain_s * num_tokens / len(step.entries)
            if not catches_up:
                cost.observe(work, step.seconds)
            elif self._is_trial:  # else a part of the prompt may have been shared, or computed with the target
                cost.observe_catching_up(work, step.seconds)

    def take_speculated_s(self) -> tuple[float, float]:
        """Implement `DraftLength.take_speculated_s`."""
        taken = self._speculated_s, self._plain_s
        self._speculated_s = self._plain_s = 0.0
        return taken

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
        self._learn()
        self._requests.pop(request_id, None)
        self._lengths.pop(request_id, None)
        self._is_kept = False
        self._passages.forget(request_id)

    def _observe_tree(
        self, entry: Entry, step: "_Step", result: SequenceResult, rates: tuple[AcceptanceRates, AcceptanceRates]
    ) -> None:
        """Count, at each position, whether the first candidate was right, and if not, which others were."""
        tree, drafts = step.trees[entry.sequence.request.request_id]
        places: list[float] = [*tree.candidates_taken(drafts, result.token_ids[: result.num_accepted])]
        if result.num_accepted < result.num_drafted:
            places.append(math.inf)
        siblings = self._siblings[entry.sequence.params.greedy]
        for position, place in enumerate(places):
            for own in rates:
                own.observe_at(position, accepted=place == 0)
            for few, many in self._numbers_of_candidates(position, step.shape):
                if place >= few:
                    siblings.observe(few, many, missed=place >= many)

    def _numbers_of_candidates(self, position: int, shape: int) -> list[tuple[int, int]]:
        """The numbers of candidates for a position in each shape and the next wider one, up to this shape; without
        those that are equal."""
        numbers = pairwise(shape.widths[position] for shape in self._shapes[: shape + 1])
        return [(few, many) for few, many in numbers if few < many]

    def _cost(self, num_sequences: int) -> "StepCost":
        """The cost of steps with about this many sequences: one straight line through all loads fits none of them."""
        load = num_sequences.bit_length()
        own = self._costs.setdefault(load, StepCost())
        if not own.is_known and not own.is_borrowed:
            near = [self._costs[other] for other in (load + 1, load - 1) if other in self._costs]
            known = next((cost for cost in near if cost.is_known), None)
            own = self._costs[load] = own if known is None else known.lend()
        return own

    def _calibrate(self, sequences: Sequences[Sequence]) -> list[int]:
        """Every length in turn, the longest first: behind a step without drafts a drafter has more to catch up with,
        and a short length would seem dear. Then rows without a model's drafts, as many as a passage may have. Then the
        same with fewer candidates."""
        turn, trial = divmod(self._num_calibrations, self._most + 1 + self._passages.num_trials)
        trial -= self._most
        self._next_shape = len(self._shapes) - 1 - turn % len(self._shapes)
        self._num_calibrations += 1
        if trial <= 0:
            return [-trial] * len(sequences)
        self._passages.make_up(sequences, trial - 1)
        return [0] * len(sequences)

    def _best_lengths(self, sequences: Sequences[Sequence], cost: "StepCost") -> list[int]:
        """Return the lengths of the best plan. The best shape so far is compared with one other, which the next look
        begins with if it is better."""
        plan = self._best_plan(sequences, cost, self._shape)
        if len(self._shapes) > 1:
            self._num_compared += 1
            other = (self._shape + 1 + self._num_compared % (len(self._shapes) - 1)) % len(self._shapes)
            found = self._best_plan(sequences, cost, other)
            if found.speed > (1 + _HYSTERESIS) * plan.speed:
                plan, self._shape = found, other
        needed = 1 - _HYSTERESIS if self._drafting else 1 + _HYSTERESIS
        self._drafting = plan.speed > needed * plan.plain_speed
        lengths = [0] * len(sequences)
        for owner in plan.owners if self._drafting else ():
            lengths[owner] += 1
        return lengths

    def _best_plan(self, sequences: Sequences[Sequence], cost: "StepCost", shape: int) -> "_Plan":
        """Assign drafts one by one, the likeliest to be accepted first; stop where tokens a second are highest."""
        priors = [rates.hoped_for() for rates in self._rates]
        siblings = [self._held_by_siblings(shape, greedy) for greedy in (False, True)]
        drafts = []  # (1 - chance that all drafts up to it are accepted, which falls along each row, position, owner)
        for owner, sequence in enumerate(sequences):
            greedy = sequence.params.greedy
            rates = self._requests[sequence.request.request_id].rates.blended(priors[greedy])
            survival = accumulate(_with_siblings(rates, siblings[greedy]), mul)
            drafts += [(1 - chance, position, owner) for position, chance in enumerate(survival)]
        drafts.sort()
        tokens = accumulate((1 - lost for lost, _, _ in drafts), initial=float(len(self._decoding)))
        rows = self._shapes[shape].rows
        positions = [position for _, position, _ in drafts]
        made = accumulate((rows[position + 1] - rows[position] for position in positions), initial=0)
        longest = accumulate((position + 1 for position in positions), max, initial=0)
        seconds = cost.seconds(len(self._decoding), [*made], [*longest], self._context())
        behind = [self._catch_up_s(sequence, cost) for sequence in sequences]
        to_catch_up = accumulate((0.0 if place else behind[owner] for _, place, owner in drafts), initial=0.0)
        speeds = list(map(truediv, tokens, map(add, seconds, to_catch_up)))  # [n * most + 1]
        best = max(range(1, len(speeds)), key=speeds.__getitem__)
        owners = [owner for _, _, owner in drafts[:best]]
        return _Plan(owners, speeds[best], speeds[0])

    def _context(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._decoding)

    def _catch_up_s(self, sequence: Sequence, cost: "StepCost") -> float:
        """Seconds for its drafter to compute what it has missed, spread over the steps that are left."""
        history, length = self._requests[sequence.request.request_id], len(sequence.tokens)
        missed = min(_MOST_BEHIND, history.num_missed(length, self._most))
        return cost.of_catching_up(missed) / max(1, sequence.params.max_tokens - sequence.num_output)

    def _repeat(self, sequences: Sequences[Sequence]) -> None:
        """Draft what sequences repeat in the model's place, one by one where that gives more tokens a second."""
        found = {index: chances for index, one in enumerate(sequences) if (chances := self._passages.find(one))}
        if not found:
            return
        lengths = [self._lengths[sequence.request.request_id] for sequence in sequences]
        cost, context = self._cost(len(self._decoding)), self._context()
        gained = [self._expected_tokens(one, length) for one, length in zip(sequences, lengths, strict=True)]
        tokens = len(self._decoding) + sum(gained)  # of the step, as it is planned so far
        rows = self._shapes[self._next_shape].rows
        num_drafts = sum(rows[length] for length in lengths)
        for index, chances in found.items():
            others = max((*lengths[:index], *lengths[index + 1 :]), default=0)
            least = num_drafts - rows[lengths[index]]
            drafts = [num_drafts, *range(least + 1, least + 1 + len(chances))]
            longest = [max(lengths)] + [others] * len(chances)
            now, *then = cost.seconds(len(self._decoding), drafts, longest, context)
            count, expected = best_count(chances, tokens - gained[index], then)
            pays = expected / then[count - 1] > _CLEAR_GAIN * tokens / now
            self._passages.choose(sequences[index], count if pays else 0)
            if pays:
                tokens, num_drafts, lengths[index] = expected, least + count, 0

    def _expected_tokens(self, sequence: Sequence, num_drafts: int) -> float:
        """Return how many of the model's drafts will be accepted."""
        greedy = sequence.params.greedy
        rates = self._requests[sequence.request.request_id].rates.blended(self._rates[greedy].hoped_for())
        rates = _with_siblings(rates, self._held_by_siblings(self._next_shape, greedy))
        return math.fsum(accumulate(rates[:num_drafts], mul))

    def _held_by_siblings(self, shape: int, greedy: bool) -> list[float]:
        """The share of tokens that other candidates hold, of those that first candidates miss, by position."""
        if shape == 0:
            return [0.0] * self._most
        missed = self._siblings[greedy].missed
        numbers = [self._numbers_of_candidates(position, shape) for position in range(self._most)]
        return [1 - math.prod(missed(few, many) for few, many in own) for own in numbers]

    def _probe(self, sequences: Sequences[Sequence], lengths: list[int]) -> bool:
        """Occasionally change the lengths: a few sequences try one more draft than pays, or the most candidates; or all
        of them draft nothing.

        Whether it did."""
        if self._num_steps < self._probed_at + _PROBE_EVERY * self._patience:
            return False
        self._patience = 1 if self._drafting else min(2 * self._patience, _MOST_PATIENCE)
        self._probed_at = self._num_steps
        self._num_probes += 1
        longest, widest = max(lengths), len(self._shapes) - 1
        trials = [(min(2, self._most), 0), (1, widest)]  # drafts, and the shape of their trees
        if self._drafting:
            trials = [(min(longest + 1, self._most), self._shape), (0, self._shape)]
            trials += [(longest, widest)] * (self._shape < widest)
        length, self._next_shape = trials[self._num_probes % len(trials)]
        lengths[:] = [min(own, length, 1) for own in lengths]
        if length == 0:
            return True
        behind = [
            self._requests[sequence.request.request_id].num_missed(len(sequence.tokens), 0) for sequence in sequences
        ]
        for index in sorted(range(len(sequences)), key=behind.__getitem__)[:_SEQUENCES_A_PROBE]:
            lengths[index] = length
        return True


_Grown = tuple[DraftTree, Sequences[int]]  # a tree, and the drafts of its nodes


class _Step(NamedTuple):
    """A step that nothing was learned from yet.

    starts: tokens of each entry's sequence before it.
    seconds: of the whole step.
    longest: as `DraftLength.observe` gets it.
    repeats: whether some drafts were passages; those are looked up before the next step.
    shape: of its trees.
    trees: of each request, where there are several shapes.
    """

    entries: Sequences[Entry]
    results: Sequences[SequenceResult]
    starts: Sequences[int]
    seconds: float
    longest: int | None
    repeats: bool
    shape: int
    trees: Mapping[str, _Grown]


class _Plan(NamedTuple):
    """The best lengths for trees of one shape.

    owners: of all drafts, those of siblings not counted.
    speed: expected tokens a second.
    plain_speed: the same without drafts.
    """

    owners: list[int]
    speed: float
    plain_speed: float


class _Shape(NamedTuple):
    """Trees with a limit to the candidates for a position.

    widths: of the limited tree, by position.
    rows: of a step that 0, 1, ... levels take.
    most_candidates: None = as many as configured.
    """

    widths: tuple[int, ...]
    rows: tuple[int, ...]
    most_candidates: int | None


def _with_siblings(rates: Sequences[float], held: Sequences[float]) -> list[float]:
    """The rates of first candidates -> those of all candidates. held: the share of other tokens that siblings hold."""
    return [rate + (1 - rate) * share for rate, share in zip(rates, held, strict=True)]


def _shapes_of(widths: tuple[int, ...]) -> list[_Shape]:
    """The configured trees, and before them narrower ones: one candidate for a position, two, four, ..."""
    widest = max(widths)
    limits = [2**power for power in range(widest.bit_length()) if 2**power < widest]
    return [
        _Shape(narrowed(widths, limit), rows_of_levels(narrowed(widths, limit)), limit) for limit in (*limits, None)
    ]


@dataclass(slots=True)
class _RequestHistory:
    """The history of one request.

    rates: of first candidates.
    drafted_at: its tokens at the start of its last round with drafts.
    """

    rates: AcceptanceRates
    drafted_at: int | None = None

    def num_missed(self, length: int, most: int) -> int:
        """Count, of so many tokens, those that its drafter has to catch up with beyond those of an ordinary round."""
        return length if self.drafted_at is None else max(0, length - self.drafted_at - most - 1)


def make_draft_length(config: DrafterConfig) -> DraftLength:
    """Return the configured policy."""
    if config.length != "dynamic":
        return DraftLength()
    return DynamicLength(config.num_draft_tokens, config.max_repeated, config.widths)
