"""The number of tokens to draft: fixed, or as many as pay.

Source of the rule: Liu et al., "Optimizing Speculative Decoding for Serving LLMs Using Goodput" (arXiv 2406.14066): of
all draft lengths of a batch, choose those with the most expected tokens a second. Expected tokens come from measured
acceptance rates (`acceptance_rates.py`), seconds from timed steps (`step_cost.py`).

A round's plan depends on earlier rounds and on the clock, never on the random numbers of the round itself, so it
changes no distribution. It does change where rounds begin, and so which text a seed gives, unless the request is
reproducible. (Requests with the same seed share random numbers, as they do without any drafts.)"""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from speculative.scheduling.acceptance_rates import AcceptanceRates
from speculative.scheduling.passages import Passages, best_count
from speculative.scheduling.step_cost import StepCost, Work
from speculative.state.batch import Entry, SequenceResult
from speculative.state.sequence import Sequence
from speculative.stats import StepStats

_LOOK_EVERY = 4  # steps with the same sequences: looking takes time, too
_PROBE_EVERY = 100  # steps; half as often where drafting does not pay
_PROBE_STEPS = 2  # in the first a drafter may have to catch up, the second shows what drafting costs
_SEQUENCES_A_PROBE = 4  # those whose drafter is least behind
_TRY_EVERY = 8  # of the steps at a new load, where another is known: what it costs there is believed first
_LEAST_GAIN = 1.02  # in tokens a second, for which anything is drafted: what drafts cost is less certain
_CLEAR_GAIN = 1.05  # for which a passage is: what is expected of it is less certain still
_MOST_BEHIND = 512  # tokens; of longer prompts a drafter computes the rest while the target does

ExpectedRates = tuple[Sequences[float], Sequences[float]]
"""The share of drafts accepted at each position: of sampled drafts, and of greedy requests' ones."""

_Own = tuple[AcceptanceRates, AcceptanceRates]  # of one request: its drafts accepted, and made


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What the next step drafts.

    lengths: most drafts of a request, by its id; others get as many as are wanted.
    repeated: by id, the tokens of a passage that is drafted in a model's place.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    repeated: Mapping[str, list[int]] = field(default_factory=dict)

    def most(self, request_id: str, wanted: int) -> int:
        """Return how many drafts a request gets, at most `wanted`."""
        repeated = self.repeated.get(request_id)
        return min(wanted, len(repeated) if repeated else self.lengths.get(request_id, wanted))


class DraftLength:
    """Decides how many tokens may be drafted for each sequence: as many as wanted, unless a method is overridden."""

    def choose(self, decoding: Sequences[Sequence]) -> DraftPlan:
        """Plan the next step, for all its sequences together."""
        del decoding
        return DraftPlan()

    def observe(
        self, entries: Sequences[Entry], results: Sequences[SequenceResult], step_s: float, longest: int | None = None
    ) -> None:
        """Learn from a step's results, and from the seconds that drafting and verifying took. `longest`: drafts that a
        model made for one sequence, where they were not those verified in the step."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""

    def restart(self, expected: ExpectedRates | None = None) -> None:
        """Forget how often drafts were accepted, but not what steps cost; `expected` replaces what is believed at
        first."""


class DynamicLength(DraftLength):
    """The number of drafts that gives the most tokens a second, for each sequence of a batch; none where none pay.

    Now and then a few sequences try the length that was not tried for the longest time, to see whether what is believed
    of it still holds; the steps are chosen by counting. Of a tree's position a draft counts as accepted if one of its
    candidates is.

    Args:
        most: tokens that a drafter makes for a sequence.
        most_repeated: tokens of a repeated passage that are drafted in a model's place where they promise more.
        rows: drafts of the first 0, 1, ... positions together, more than one each where they are trees.
        stats: gets the time of steps with drafts, and what their tokens would have taken without.
    """

    def __init__(
        self, most: int, most_repeated: int = 0, rows: Sequences[int] = (), stats: StepStats | None = None
    ) -> None:
        self._most, self._passages = most, Passages(most_repeated)
        self._rows = rows or range(most + 1)
        self._stats = stats or StepStats()
        self._costs: dict[int, StepCost] = {}  # by the number of binary digits of the number of sequences
        self._expected_rates: ExpectedRates = (), ()
        self.restart()

    def restart(self, expected: ExpectedRates | None = None) -> None:
        """Implement `DraftLength.restart`."""
        self._expected_rates = self._expected_rates if expected is None else expected
        # Those of sampled drafts and those of greedy requests' ones, which differ.
        self._rates = [AcceptanceRates(self._most, keep=0.998, expected=rates) for rates in self._expected_rates]
        # The share made of the drafts that were asked for: where nothing repeats, a lookup finds none.
        self._made = AcceptanceRates(self._most, keep=0.998, expected=(1.0,) * self._most)
        self._passages.restart()
        self._own: dict[str, _Own] = {}
        self._drafted_at: dict[str, int] = {}  # its tokens before its last round with drafts
        self._decoding: list[Sequence] = []
        self._plan = DraftPlan()
        self._kept_until = 0  # step, while the sequences are the same
        self._num_steps = self._num_trials = self._probed_at = 0
        self._tried: dict[int, int] = {}  # the step in which each length was planned last
        self.is_trial = False  # whether all steps serve to learn what steps cost

    def forget(self, request_id: str) -> None:
        """Implement `DraftLength.forget`."""
        self._own.pop(request_id, None)
        self._drafted_at.pop(request_id, None)
        self._passages.forget(request_id)

    def cost(self, num_sequences: int) -> StepCost:
        """The cost of steps with about this many sequences: one straight line through all loads fits none of them."""
        load = num_sequences.bit_length()
        if load not in self._costs:
            near = [self._costs[other] for other in (load + 1, load - 1) if other in self._costs]
            self._costs[load] = StepCost(next((cost for cost in near if cost.is_known), None))
        return self._costs[load]

    # -- what is chosen ---------------------------------------------------------------------------------------------

    def choose(self, decoding: Sequences[Sequence]) -> DraftPlan:
        """Plan the next step; for the same sequences as last, what was planned lately."""
        self._num_steps += 1
        if self._num_steps >= self._kept_until or decoding != self._decoding:
            self._look(decoding)
        return self._plan if self._is_trying else self._with_passages()

    def _look(self, decoding: Sequences[Sequence]) -> None:
        """Make a new plan."""
        self._decoding = list(decoding)
        self._speculating = [sequence for sequence in decoding if sequence.params.speculate]
        self._kept_until, self._is_trying, self._plan = self._num_steps + 1, True, DraftPlan()
        if not self._speculating:
            return
        for sequence in self._speculating:
            if (name := sequence.request.request_id) not in self._own:
                self._own[name] = AcceptanceRates(self._most, keep=0.97), AcceptanceRates(self._most, keep=0.97)
        cost = self.cost(len(decoding))
        if self.is_trial or not (cost.is_known or (cost.is_borrowed and self._num_steps % _TRY_EVERY)):
            self._try()
            return
        lengths = self._best(cost)
        if self._num_steps < self._probed_at + _PROBE_EVERY * (1 if any(lengths) else 2):
            self._is_trying, self._kept_until = False, self._num_steps + _LOOK_EVERY
            self._set(lengths)
        else:
            self._probed_at, self._kept_until = self._num_steps, self._num_steps + _PROBE_STEPS
            self._probe(lengths)

    def _set(self, lengths: Sequences[int], repeated: Mapping[str, list[int]] | None = None) -> None:
        ids = [sequence.request.request_id for sequence in self._speculating]
        self._plan = DraftPlan(dict(zip(ids, lengths, strict=True)), repeated or {})
        self._tried[max(lengths)] = self._num_steps

    def _try(self) -> None:
        """Every length in turn, the longest first: behind a step without drafts a drafter has more to catch up with.
        Then rows without a model's drafts, as many as a passage may have. Then the same for half of the sequences,
        which separates the cost of rows from that of the drafter's passes."""
        turn, trial = divmod(self._num_trials, self._most + 1 + self._passages.num_trials)
        self._num_trials += 1
        length = max(0, self._most - trial)
        lengths = [0 if turn % 2 and index % 2 else length for index in range(len(self._speculating))]
        made_up = self._passages.make_up(self._speculating, trial - self._most - 1) if trial > self._most else {}
        self._set(lengths, made_up)

    def _probe(self, lengths: list[int]) -> None:
        """Plan what was not tried for the longest time of what might pay by now, for a few sequences."""
        longest = max(lengths)
        probes = (min(longest + 1, self._most), max(longest, 1), 0) if longest else (1,)
        length = min(probes, key=lambda probe: self._tried.get(probe, 0))
        behind = [self._num_missed(sequence) for sequence in self._speculating]
        few = sorted(range(len(lengths)), key=behind.__getitem__)[:_SEQUENCES_A_PROBE]
        self._set([length if index in few else min(own, length, 1) for index, own in enumerate(lengths)])

    def _best(self, cost: StepCost) -> list[int]:
        """Assign drafts one by one, the likeliest to be accepted first, and stop where tokens a second are highest."""
        drafts, made = [], []  # (1 - chance that it is made and accepted, which falls along each row, position, owner)
        for owner, sequence in enumerate(self._speculating):
            shares, chances = self._expected(sequence)
            drafts += [(1 - chance, place, owner) for place, chance in enumerate(chances)]
            made.append(shares)
        drafts.sort()
        behind = [self._num_missed(one) / max(1, one.params.max_tokens - one.num_output) for one in self._speculating]
        rows, work, tokens = self._rows, self._work(), float(len(self._decoding))
        speeds = [tokens / cost.seconds(work)]
        for lost, place, owner in drafts:
            tokens += 1 - lost
            num_drafts = work.num_drafts + made[owner][place] * (rows[place + 1] - rows[place])
            longest = max(work.longest, place + 1)
            missed = work.num_missed + (0 if place else behind[owner])  # spread over the steps that are left
            work = work._replace(num_drafts=num_drafts, longest=longest, num_missed=missed)
            speeds.append(tokens / cost.seconds(work))
        best = max(range(len(speeds)), key=speeds.__getitem__)
        best = best if speeds[best] > _LEAST_GAIN * speeds[0] else 0
        owners = [owner for _, _, owner in drafts[:best]]
        return [owners.count(owner) for owner in range(len(behind))]

    def _work(self, num_drafts: float = 0, longest: int = 0) -> Work:
        context = sum(len(sequence.tokens) for sequence in self._decoding)
        return Work(len(self._decoding), num_drafts, longest, context)

    def _expected(self, sequence: Sequence) -> tuple[list[float], list[float]]:
        """Return the share of drafts that are made where they are asked for, and the chance that all up to it are made
        and accepted, by position."""
        (own_rates, own_made), greedy = self._own[sequence.request.request_id], sequence.params.greedy
        shares, rates = own_made.blended(self._made.blended()), own_rates.blended(self._rates[greedy].hoped_for())
        return shares, [*map(mul, shares, accumulate(rates, mul))]

    def _num_missed(self, sequence: Sequence) -> int:
        """Count the tokens that a drafter has to catch up with, beyond those of an ordinary round."""
        drafted_at = self._drafted_at.get(sequence.request.request_id, 0)
        return min(_MOST_BEHIND, max(0, len(sequence.tokens) - drafted_at - self._most - 1))

    def _with_passages(self) -> DraftPlan:
        """The plan, with what sequences repeat in the model's place where that gives more tokens a second."""
        found = [(one, passage) for one in self._speculating if (passage := self._passages.find(one))]
        if not found:
            return self._plan
        cost, rows, lengths = self.cost(len(self._decoding)), self._rows, dict(self._plan.lengths)
        repeated = dict[str, list[int]]()
        gained = {one.request.request_id: self._expected(one)[1] for one in self._speculating}
        tokens = len(self._decoding) + sum(sum(gained[name][:length]) for name, length in lengths.items())
        num_drafts = sum(rows[length] for length in lengths.values())
        for sequence, passage in found:
            name = sequence.request.request_id
            own = lengths[name]
            now = cost.seconds(self._work(num_drafts, max(lengths.values())))
            lengths[name] = 0
            least, others = num_drafts - rows[own], max(lengths.values())
            then = [cost.seconds(self._work(least + count, others)) for count in range(1, len(passage.chances) + 1)]
            count, expected = best_count(passage.chances, tokens - sum(gained[name][:own]), then)
            if expected / then[count - 1] > _CLEAR_GAIN * tokens / now:
                repeated[name], tokens, num_drafts = passage.tokens[:count], expected, least + count
            else:
                lengths[name] = own
        return replace(self._plan, repeated=repeated)

    # -- what is learned --------------------------------------------------------------------------------------------

    def observe(
        self, entries: Sequences[Entry], results: Sequences[SequenceResult], step_s: float, longest: int | None = None
    ) -> None:
        """Count what was accepted, and what a step took that only decoded."""
        num_drafts, most, missed, is_plain = 0, 0, 0, bool(entries)
        for entry, result in zip(entries, results, strict=True):
            name, sequence = entry.sequence.request.request_id, entry.sequence
            is_plain &= entry.samples and entry.num_known == 1
            if name not in self._own or result.fault is not None:
                continue
            if entry.by_drafter:
                made = [place < result.num_drafted for place in range(min(entry.max_drafts, self._most))]
                _, own_made = self._own[name]
                for shares in (own_made, self._made):
                    shares.observe(made)
            if not result.num_drafted:
                continue
            if entry.repeated:
                num_drafts += result.num_drafted
                self._passages.observe(sequence, result)
                continue
            num_drafts += self._rows[min(result.num_drafted, self._most)]
            most = max(most, result.num_drafted)
            # Of a first draft's prompt a part may have been shared, or computed with the target.
            is_plain &= self.is_trial or name in self._drafted_at
            missed += self._num_missed(sequence)
            self._drafted_at[name] = len(sequence.tokens)
            own_rates, _ = self._own[name]
            hits = [True] * result.num_accepted + [False] * (result.num_accepted < result.num_drafted)
            for rates in (own_rates, self._rates[sequence.params.greedy]):
                rates.observe(hits)
        if not is_plain:
            return
        cost, context = self.cost(len(entries)), sum(len(entry.sequence.tokens) for entry in entries)
        work = Work(len(entries), num_drafts, most if longest is None else longest, context, missed)
        if num_drafts and cost.is_known and not self.is_trial:
            num_tokens = sum(result.num_accepted + 1 for result in results)
            self._stats.speculated_s += cost.usual(work, step_s)
            plain_s = cost.seconds(Work(len(entries), 0, 0, context))
            self._stats.speculated_plain_s += plain_s * num_tokens / len(entries)
        cost.observe(work, step_s)
