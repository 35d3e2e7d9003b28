"""How many tokens to draft: what is learned, what is chosen from it, and that no distribution depends on it."""

import dataclasses
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speculative.config import DrafterConfig
from speculative.drafting.base import Drafter, DraftOutput, WeightlessDrafter
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from speculative.scheduling.acceptance_rates import AcceptanceRates
from speculative.scheduling.draft_length import DraftLength, DynamicLength, make_draft_length
from speculative.scheduling.step_cost import StepCost, Work
from speculative.state.batch import Batch, Entry, SequenceResult
from speculative.state.draft_tree import DraftTree, narrowed
from speculative.state.sequence import Sequence
from speculative.verification.draft_probs import PointMass
from tests.support.engines import assert_idle, run, tiny_engine
from tests.support.markov_chain import sample, worst_window
from tests.support.tiny_models import write_tiny_model
from tools.faults.toy import TableDrafter, engine_over

MOST = 4
WIDTHS = (4, 2, 1, 1)
DYNAMIC = DrafterConfig(kind="ngram", num_draft_tokens=MOST, ngram_min=1, length="dynamic")


class Fixed(DraftLength):
    """Always the same length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def max_drafts(self, sequence: Sequence, wanted: int) -> int:
        return min(self.length, wanted)


Seconds = Callable[[int, int, int], float]  # of a step, by sequences, drafts and the longest draft


def on_cpu(num_sequences: int, num_drafts: int, longest: int) -> float:
    """About a 135M model in bfloat16 on one core, with an EAGLE head."""
    return 0.0207 + 0.0009 * (num_sequences + num_drafts) + 0.004 * longest


def by_rows(num_sequences: int, num_drafts: int, longest: int) -> float:
    return 0.0207 + 0.0009 * (num_sequences + num_drafts)


def dear_beyond_five(num_sequences: int, num_drafts: int, longest: int) -> float:
    """Four sequences on a processor that four more rows cost little, and further ones as much as tokens."""
    return 0.03 + 0.001 * longest + 0.004 * max(0, num_sequences + num_drafts - 8)


def free_rows(num_sequences: int, num_drafts: int, longest: int) -> float:
    return 0.02 + 1e-6 * (num_sequences + num_drafts)


def dear_rows(num_sequences: int, num_drafts: int, longest: int) -> float:
    return 0.001 * (num_sequences + num_drafts)


def half_dear_rows(num_sequences: int, num_drafts: int, longest: int) -> float:
    return 0.002 + 0.001 * (num_sequences + num_drafts)


class World:
    """A fake engine: requests whose drafts are accepted at a known rate, steps that take a known time, give or take."""

    def __init__(
        self,
        policy: DraftLength,
        seconds: Seconds,
        rates: Sequences[float],
        noise: float = 0.05,
        seed: int = 0,
        drift: float = 0.0,
    ) -> None:
        self.policy = policy
        self.seconds = seconds
        self.random = random.Random(seed)
        self.noise, self.drift, self.pace = noise, drift, 0.0
        self.rates = list(rates)
        params = SamplingParams(max_tokens=10**6)
        self.sequences = [
            Sequence(Request(str(i), (1, 2, 3), params, seed=i), tokens=(1, 2, 3, 4)) for i in range(len(rates))
        ]
        for sequence in self.sequences:
            sequence.num_computed = 3
        self.lengths: list[list[int]] = []
        self.num_tokens = 0
        self.elapsed_s = 0.0

    def be_greedy(self, index: int) -> None:
        """Put a greedy request in the place of one."""
        old = self.sequences[index]
        request = dataclasses.replace(old.request, params=SamplingParams(max_tokens=10**6, temperature=0.0))
        self.sequences[index] = Sequence(request, tokens=tuple(old.tokens))
        self.sequences[index].num_computed = old.num_computed

    def step(self) -> None:
        self.policy.plan(self.sequences)
        lengths = [self.policy.max_drafts(sequence, MOST) for sequence in self.sequences]
        drawn = [self._verify(*each) for each in zip(self.sequences, lengths, self.rates, strict=True)]
        step_s = self.seconds(len(lengths), sum(map(self._rows, lengths)), max(lengths))
        if self.drift:
            self.pace = 0.99 * self.pace + self.random.gauss(0, math.sqrt(1 - 0.99**2) * self.drift)
        measured = (
            step_s * self.random.lognormvariate(self.pace, self.noise) * (20 if self.random.random() < 0.005 else 1)
        )
        entries = [Entry(sequence, 1, MOST, samples=True) for sequence in self.sequences]
        self.policy.observe(entries, drawn, measured)
        for sequence, one in zip(self.sequences, drawn, strict=True):
            sequence.advance(sequence.num_computed + one.num_accepted + 1, one.token_ids)
            self.num_tokens += len(one.token_ids)
        self.elapsed_s += step_s
        self.lengths.append(lengths)

    def run(self, num_steps: int) -> "World":
        for _ in range(num_steps):
            self.step()
        return self

    def _rows(self, length: int) -> int:
        return length

    def _verify(self, sequence: Sequence, length: int, rate: float) -> SequenceResult:
        del sequence
        accepted = next((n for n in range(length) if self.random.random() >= rate), length)
        return SequenceResult((5,) * (accepted + 1), length, accepted)

    @property
    def speed(self) -> float:
        return self.num_tokens / self.elapsed_s

    def share(self, length: int, sequence: int = 0, last: int = 300) -> float:
        """How often a sequence got this length lately."""
        return float(np.mean([lengths[sequence] == length for lengths in self.lengths[-last:]]))


class TreeWorld(World):
    """The same with trees. chances: of the target's token to be the first candidate for a position, the second, ..."""

    def __init__(self, policy: DraftLength, seconds: Seconds, chances: Sequences[float], **settings: Any) -> None:
        super().__init__(policy, seconds, [0.0], **settings)
        self.chances = chances
        self.widths: list[tuple[int, ...]] = []

    def step(self) -> None:
        super().step()
        self.widths.append(self._widths(self.lengths[-1][0]))

    def _widths(self, length: int) -> tuple[int, ...]:
        return narrowed(WIDTHS, self.policy.most_candidates)[:length]

    def _rows(self, length: int) -> int:
        return len(DraftTree.of_widths(self._widths(length)))

    def _verify(self, sequence: Sequence, length: int, rate: float) -> SequenceResult:
        tree = DraftTree.of_widths(self._widths(length))
        ranks = [children.index(node) for node, children in self._with_siblings(tree)]
        self.policy.grown(sequence, tree, [100 + rank for rank in ranks])
        said = []
        for width in self._widths(length):
            rank = self.random.choices(range(len(self.chances) + 1), [*self.chances, 1 - sum(self.chances)])[0]
            if rank >= min(width, len(self.chances)):
                break
            said.append(100 + rank)
        return SequenceResult((*said, 5), length, len(said))

    def _with_siblings(self, tree: DraftTree) -> list[tuple[int, tuple[int, ...]]]:
        return [(node, tree.children[parent]) for node, parent in enumerate(tree.parents, 1)]

    def share_of(self, *shapes: tuple[int, ...], last: int = 300) -> float:
        """How often trees had one of these shapes lately."""
        return float(np.mean([widths in shapes for widths in self.widths[-last:]]))


class FixedTrees(Fixed):
    """Always the same shape."""

    def __init__(self, length: int, most_candidates: int | None) -> None:
        super().__init__(length)
        self.most_candidates = most_candidates


# -- what is chosen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("num_sequences", [1, 4, 16])
def test_it_is_as_fast_as_the_best_static_length(num_sequences: int, rate: float) -> None:
    rates = [rate] * num_sequences
    static = [World(Fixed(length), on_cpu, rates).run(1200).speed for length in range(MOST + 1)]
    dynamic = [World(DynamicLength(MOST), on_cpu, rates, seed=seed).run(1200).speed for seed in range(6)]
    assert np.mean(dynamic) > 0.96 * max(static), "calibration and probes included"
    assert max(static) > 1.15 * min(static), "the choice matters"


@pytest.mark.parametrize("rate", [0.3, 0.4])
def test_a_machine_whose_pace_drifts_is_not_taken_for_dear_drafts(rate: float) -> None:
    worlds = [World(DynamicLength(MOST), by_rows, [rate], seed=seed, drift=0.2).run(1500) for seed in range(6)]
    static = max(World(Fixed(length), by_rows, [rate]).run(6000).speed for length in range(MOST + 1))
    assert np.mean([world.speed for world in worlds]) > 0.97 * static
    assert np.mean([world.share(0, last=1400) for world in worlds]) < 0.1, "drafts pay all the time"


@pytest.mark.parametrize(("seconds", "rate"), [(on_cpu, 0.7), (on_cpu, 0.95), (by_rows, 0.5)])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_the_time_that_drafts_are_said_to_save_is_what_they_save(
    num_sequences: int, seconds: Seconds, rate: float
) -> None:
    policy = DynamicLength(MOST)
    world = World(policy, seconds, [rate] * num_sequences).run(300)
    policy.take_speculated_s()
    num_tokens, elapsed_s = world.num_tokens, world.elapsed_s
    world.run(1200)
    spent_s, plain_s = policy.take_speculated_s()
    num_tokens, elapsed_s = world.num_tokens - num_tokens, world.elapsed_s - elapsed_s
    saved = 1 - elapsed_s / (num_tokens / num_sequences * seconds(num_sequences, 0, 0))
    assert saved > 0.2
    assert 1 - spent_s / plain_s == pytest.approx(saved, abs=0.06)
    assert policy.take_speculated_s() == (0.0, 0.0)


def test_nothing_is_said_to_be_saved_where_nothing_is_drafted_or_known() -> None:
    policy = DynamicLength(MOST)
    World(policy, on_cpu, [0.7]).run(10)
    assert policy.take_speculated_s() == (0.0, 0.0), "what a step costs is not known yet"
    policy.begin_trial()
    World(policy, on_cpu, [0.7]).run(100)
    assert policy.take_speculated_s() == (0.0, 0.0), "made-up requests gain nobody anything"
    assert make_draft_length(DrafterConfig(kind="ngram")).take_speculated_s() == (0.0, 0.0)


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_it_drafts_nothing_where_nothing_is_accepted_and_rows_cost(num_sequences: int) -> None:
    world = World(DynamicLength(MOST), on_cpu, [0.0] * num_sequences).run(900)
    assert world.share(0) > 0.97
    assert 0 < sum(map(sum, world.lengths[-600:])) <= 600 / 90 * 2 * num_sequences, "a probe now and then"


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_it_drafts_all_it_may_where_all_is_accepted(num_sequences: int) -> None:
    assert World(DynamicLength(MOST), on_cpu, [1.0] * num_sequences).run(600).share(MOST) > 0.97
    assert np.mean(World(DynamicLength(MOST), free_rows, [0.5] * num_sequences).run(600).lengths[-300:]) > 3.3


def dear_when_full(num_sequences: int, num_drafts: int, longest: int) -> float:
    """A single sequence's drafts cost next to nothing; those of a full batch as much as its tokens."""
    return 0.01 + 0.0001 * longest if num_sequences == 1 else 0.04 + 0.0025 * num_drafts


def test_what_a_load_costs_is_not_taken_for_what_another_does() -> None:
    policy = DynamicLength(MOST)
    assert World(policy, dear_when_full, [0.7]).run(100).share(MOST, last=50) > 0.8
    assert World(policy, dear_when_full, [0.7] * 16).run(400).share(0, last=300) > 0.9
    assert World(policy, dear_when_full, [0.7]).run(50).share(MOST, last=50) > 0.8
    assert World(policy, dear_when_full, [0.7] * 16).run(50).share(0, last=50) > 0.8


@pytest.mark.parametrize(("rate", "most"), [(0.95, 4), (0.02, 0)])
def test_what_a_head_came_to_in_training_is_believed_at_first(rate: float, most: int) -> None:
    policy = DynamicLength(MOST)
    World(policy, on_cpu, [0.5]).run(100)
    policy.restart(((rate,) * MOST, (1 - rate,) * MOST))
    assert World(policy, on_cpu, [rate]).run(3).lengths == [[most]] * 3, "from the first step: costs are known"


def test_rates_that_were_believed_are_corrected() -> None:
    policy = DynamicLength(MOST)
    policy.restart(((0.95, 0.95), ()))
    assert policy._rates[False].blended() == pytest.approx([0.95] * 4, abs=0.08)
    assert World(policy, on_cpu, [0.0]).run(400).share(0, last=100) > 0.95


def test_a_load_that_comes_by_is_not_calibrated_again() -> None:
    policy = DynamicLength(MOST)
    world = World(policy, dear_rows, [0.5] * 16).run(150)
    world.sequences, world.rates = world.sequences[:12], world.rates[:12]
    world.run(24)
    tried = [lengths for lengths in world.lengths[-24:] if any(lengths)]
    assert 1 <= len(tried) <= 5, "a few steps try other lengths, the others what pays at twice the load"
    assert policy._cost(12).is_borrowed and not policy._cost(16).is_borrowed
    assert not policy._cost(1).is_borrowed, "sixteen sequences say nothing of one"


def test_rows_that_cost_as_much_as_tokens_are_not_drafted() -> None:
    assert World(DynamicLength(MOST), dear_rows, [0.8] * 8).run(900).share(0) > 0.9


def test_a_request_whose_drafts_are_accepted_gets_more_of_them() -> None:
    worlds = [World(DynamicLength(MOST), by_rows, [0.95, 0.05, 0.05, 0.05], seed=seed) for seed in range(3)]
    given = np.mean([world.run(900).lengths[-300:] for world in worlds], axis=(0, 1))
    assert given[0] > 3
    assert given[1:].max() < 1


@pytest.mark.parametrize("held_up", [(2,), (5,), (19,), (2, 6), (2, 3, 17)])
def test_steps_that_something_held_up_do_not_count_in_a_calibration(held_up: Sequences[int]) -> None:
    """Of trees most numbers of rows are tried once, so that no other step tells that one took too long."""
    cost, noise = StepCost(), random.Random(3)
    for step in range(20):
        drafts, longest = ((0, 0), (1, 1), (2, 2), (4, 1), (6, 2), (10, 3), (12, 2), (20, 3), (28, 4))[step % 9]
        slow = 20 if step in held_up else 1
        cost.observe(Work(1, drafts, longest, 100 + 2 * step), slow * noise.gauss(1, 0.02) * on_cpu(1, drafts, longest))
    found = cost.seconds(1, [0, 1, 2, 4, 12, 28], [0, 1, 2, 1, 2, 4], 140)
    right = [on_cpu(1, *drafts) for drafts in ((0, 0), (1, 1), (2, 2), (4, 1), (12, 2), (28, 4))]
    assert found == pytest.approx(right, rel=0.1)


@pytest.mark.parametrize("believed", [2e-7, 1e-6, 4e-6])
def test_what_context_costs_at_another_load_leaves_room_for_the_rest(believed: float) -> None:
    """A slope that short contexts showed may be far off at long ones."""
    works = [(0, 0), (1, 1), (2, 2), (4, 1), (6, 2), (10, 3), (12, 2), (20, 3), (28, 4)]
    other, noise = StepCost(), random.Random(1)
    for step in range(60):
        context = 50 + 6 * step
        other.observe(Work(2, *works[step % 9], context), on_cpu(2, *works[step % 9]) + believed * context)
    cost = other.lend()
    asked = tuple(zip(*works, strict=True))
    right = [on_cpu(1, *work) + 2e-7 * 12_000 for work in works]
    for step in range(200):
        cost.observe(
            Work(1, *works[step % 9], 12_000), noise.gauss(1, 0.05) * (on_cpu(1, *works[step % 9]) + 2e-7 * 12_000)
        )
        if step >= 19:
            assert cost.seconds(1, *asked, 12_000) == pytest.approx(right, rel=0.3 if step < 60 else 0.1)


@pytest.mark.parametrize("seconds", [on_cpu, by_rows, free_rows, dear_rows])
@pytest.mark.parametrize("chances", [(0.45, 0.15, 0.08, 0.04), (0.9, 0.02, 0.01, 0.01), (0.1, 0.1, 0.1, 0.1)])
def test_trees_are_as_wide_as_pays(seconds: Seconds, chances: Sequences[float]) -> None:
    fixed = [
        TreeWorld(FixedTrees(length, most), seconds, chances).run(2000).speed
        for length in range(MOST + 1)
        for most in (1, 2, None)
    ]
    worlds = [TreeWorld(DynamicLength(MOST, widths=WIDTHS), seconds, chances, seed=seed).run(100) for seed in range(4)]
    for world in worlds:
        world.num_tokens, world.elapsed_s = 0, 0.0  # of a warm-up: trees cost much where rows do
    assert np.mean([world.run(1200).speed for world in worlds]) > 0.95 * max(fixed)


def test_rows_that_cost_nothing_have_siblings_and_dear_ones_none() -> None:
    chances = (0.8, 0.1, 0.03, 0.02)
    cheap = TreeWorld(DynamicLength(MOST, widths=WIDTHS), free_rows, chances).run(900)
    assert cheap.share_of(WIDTHS) > 0.9
    dear = TreeWorld(DynamicLength(MOST, widths=WIDTHS), half_dear_rows, chances).run(900)
    assert dear.share_of((1, 1), (1, 1, 1), (1, 1, 1, 1)) > 0.9


def believed(policy: DynamicLength) -> list[float]:
    """The share of tokens that each shape's candidates for the first position are believed to hold, sampled."""
    (rate, *_) = policy._rates[False].blended()
    held = [policy._held_by_siblings(shape, greedy=False)[0] for shape in range(len(policy._shapes))]
    return [rate + (1 - rate) * share for share in held]


def test_a_wide_round_shows_what_fewer_candidates_are_worth() -> None:
    policy = DynamicLength(MOST, widths=WIDTHS)
    world = TreeWorld(policy, free_rows, (0.5, 0.2, 0.06, 0.04)).run(1200)
    assert world.share_of(WIDTHS) > 0.9
    assert believed(policy) == pytest.approx([0.5, 0.7, 0.8], abs=0.06)


@pytest.mark.parametrize("after", [(0.6, 0.22, 0.1, 0.05), (0.6, 0.01, 0.01, 0.01)])
def test_what_siblings_are_worth_follows_the_text(after: Sequences[float]) -> None:
    """A chain's rounds show nothing of siblings; what these were worth long ago must not be believed for ever."""

    def seconds(num_sequences: int, num_drafts: int, longest: int) -> float:
        return 0.02 + 0.0006 * (num_sequences + num_drafts) + 0.0015 * longest

    fixed = [
        TreeWorld(FixedTrees(length, most), seconds, after).run(3000).speed for length in (3, 4) for most in (1, 2)
    ]
    speeds = []
    for seed in range(4):
        policy = DynamicLength(MOST, widths=WIDTHS)
        world = TreeWorld(policy, seconds, (0.3, 0.01, 0.01, 0.01), seed=seed).run(800)
        assert world.share_of(WIDTHS) < 0.1
        world.chances = after
        world.run(2500)
        world.num_tokens, world.elapsed_s = 0, 0.0
        speeds.append(world.run(1500).speed)
        assert believed(policy) == sorted(believed(policy)), "more candidates hold no less"
    assert np.mean(speeds) > 0.95 * max(fixed)


def test_what_drawn_drafts_are_worth_is_not_taken_for_greedy_ones() -> None:
    policy = DynamicLength(MOST)
    world = World(policy, on_cpu, [0.95, 0.05])
    world.be_greedy(0)
    world.run(360)
    for sequence in world.sequences:
        policy.forget(sequence.request.request_id)
    new = world.run(12).lengths[-12:]
    assert min(greedy for greedy, _ in new) >= 3, "a new greedy request begins with what the last ones came to"
    assert max(drawn for _, drawn in new) <= 1


def test_a_probe_goes_one_draft_beyond_what_pays() -> None:
    """Rows are dear in a full batch: four drafts for four sequences each would cost half a step."""
    worlds = [World(DynamicLength(MOST), dear_beyond_five, [0.6] * 4, seed=seed).run(900) for seed in range(5)]
    assert np.median([world.share(1) for world in worlds]) > 0.9
    assert {max(lengths) for world in worlds for lengths in world.lengths[-600:]} == {0, 1, 2}


def test_it_notices_when_drafts_begin_to_be_accepted_and_when_they_cease() -> None:
    world = World(DynamicLength(MOST), on_cpu, [0.0]).run(400)
    assert world.share(0, last=100) > 0.95
    world.rates = [1.0]
    assert world.run(2500).share(MOST, last=100) > 0.9
    world.rates = [0.0]
    assert world.run(900).share(0, last=100) > 0.9


def test_a_limit_is_kept_and_a_request_without_speculation_left_alone() -> None:
    policy = DynamicLength(MOST)
    World(policy, on_cpu, [1.0, 1.0]).run(80)
    quiet = Sequence(Request("quiet", (1, 2), SamplingParams(speculate=False)), tokens=(1, 2, 3))
    eager = Sequence(Request("eager", (1, 2), SamplingParams()), tokens=(1, 2, 3))
    policy.plan([quiet, eager])
    assert policy.max_drafts(quiet, 0) == 0
    assert [policy.max_drafts(eager, wanted) for wanted in (0, 2, MOST)] == [0, 2, MOST]
    policy.plan([quiet])
    policy.plan([])


def test_the_settings_choose() -> None:
    assert not isinstance(make_draft_length(DrafterConfig()), DynamicLength)
    assert isinstance(make_draft_length(DYNAMIC), DynamicLength)
    sequence = Sequence(Request("a", (1, 2)), tokens=(1, 2))
    assert DraftLength().max_drafts(sequence, 3) == 3


# -- what is learned -----------------------------------------------------------------------------------------------


def test_rates_are_shares_of_the_positions_that_were_reached() -> None:
    rates = AcceptanceRates(3, keep=1.0)
    for num_drafted, num_accepted in [(3, 3), (3, 0), (2, 2), (3, 1), (0, 0)] * 500:
        rates.observe(num_drafted, num_accepted)
    assert rates.blended() == pytest.approx([3 / 4, 2 / 3, 1.0], abs=0.01)
    unknown = AcceptanceRates(3, keep=0.9)
    assert unknown.blended([0.1, 0.2, 0.3]) == pytest.approx([0.1, 0.2, 0.3])
    for _ in range(200):
        unknown.observe(1, 1)
    assert unknown.blended([0.1, 0.2, 0.3]) == pytest.approx([0.4, 0.8, 1.0]), "later positions follow the first"
    for _ in range(200):
        unknown.observe(1, 0)
    assert unknown.blended([0.0, 0.2, 0.3])[0] < 0.01, "old rounds are forgotten"


def test_the_cost_of_a_step_is_found_in_noisy_times() -> None:
    generator = random.Random(0)
    cost = StepCost()
    for _ in range(1500):
        longest = generator.randrange(5)
        num_drafts = sum(generator.randint(0, longest) for _ in range(8))
        context = generator.randrange(1000, 5000)
        true = on_cpu(8, num_drafts, longest) + 1e-6 * context
        cost.observe(Work(8, num_drafts, longest, context), true * generator.lognormvariate(0, 0.05))
    longest = np.array([0, 1, 2, 2, 3, 3, 4])
    drafts = range(len(longest))
    expected = [on_cpu(8, count, int(most)) + 0.003 for count, most in zip(drafts, longest, strict=True)]
    assert cost.seconds(8, drafts, longest, 3000) == pytest.approx(expected, rel=0.04)
    before = cost.seconds(8, drafts, longest, 3000)
    cost.observe(Work(8, 4, 1, 3000), 1000.0)
    assert cost.seconds(8, drafts, longest, 3000) == pytest.approx(before, rel=0.05), "one hiccup is no cost"


def test_what_catching_up_costs_is_seen_in_a_trial_and_counts_where_little_is_left() -> None:
    """A prompt of 1,000 tokens takes a drafter as long as three steps: too long for the last few tokens."""
    policy = DynamicLength(MOST)
    policy.begin_trial()
    world = World(policy, by_rows, [0.9]).run(30)
    for sequence in world.sequences:
        policy.forget(sequence.request.request_id)
    sequence = world.sequences[0]
    sequence.tokens += [5] * 1000
    policy.plan(world.sequences)
    result = SequenceResult((5, 5), 1, 1)
    behind = 0.0001 * len(sequence.tokens)
    policy.observe([Entry(sequence, 1, MOST, samples=True)], [result], by_rows(1, 1, 1) + behind)
    policy.forget("0")
    policy.restart(((0.5, 0.1, 0.1, 0.1), ()))
    assert policy._cost(1).of_catching_up(1000) == pytest.approx(0.1, rel=0.1)

    def lengths(max_tokens: int) -> int:
        request = Request(str(max_tokens), (1,) * 400, SamplingParams(max_tokens=max_tokens))
        policy.plan([new := Sequence(request, tokens=(1,) * 401)])
        return policy.max_drafts(new, MOST)

    assert lengths(1000) > 0
    assert lengths(4) == 0


def test_steps_are_learned_from_by_the_next_look() -> None:
    policy = DynamicLength(MOST)
    world = World(policy, on_cpu, [1.0]).run(40)
    rates, reached = policy._rates[False], []
    for _ in range(12):
        world.step()
        reached.append(rates._reached[0])
    assert 3 <= len(set(reached)) <= 4, "every fourth step"
    assert policy._unread
    policy.forget("0")
    assert not policy._unread and rates._reached[0] > reached[-1]


# -- in the engine -------------------------------------------------------------------------------------------------

V, LENGTH, FIRST = 16, 7, 3


def dynamic_engine(
    table: torch.Tensor, drafter: Drafter, seconds: Seconds, **changes: Any
) -> tuple[EngineCore, DynamicLength]:
    """An engine over a table whose draft length is dynamic, and whose steps take as long as is said."""
    engine = engine_over(table, drafter, num_drafts=MOST, **changes)
    policy = engine.scheduler.draft_length = DynamicLength(MOST)
    observe = policy.observe

    def timed(entries: Sequences[Entry], results: Sequences[SequenceResult], step_s: float) -> None:
        assert 0 < step_s < 60
        counts = [one.num_drafted for one in results]
        observe(entries, results, seconds(len(entries), sum(counts), max(counts, default=0)))

    policy.observe = timed  # type: ignore[method-assign]
    return engine, policy


def alike(p: torch.Tensor) -> torch.Tensor:
    return p.expand(V, V)


@pytest.fixture(scope="module")
def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """The target's distribution and the drafter's, after any token."""
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(1)) * 1.2
    p = logits[0].softmax(-1)
    return p, 0.6 * p + 0.4 * logits[1].softmax(-1)


def test_it_learns_the_acceptance_that_the_distributions_give(distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, q = distributions
    drafter = TableDrafter(alike(q), 3)
    engine, policy = dynamic_engine(alike(p.log()), drafter, free_rows)
    sample(engine, (FIRST,), 2000, 12)
    truth = float(torch.minimum(p, q).sum())
    assert policy._rates[False].blended()[:3] == pytest.approx([truth] * 3, abs=0.06)
    assert not policy._requests


class Spy(WeightlessDrafter):
    """Says what it was asked for."""

    def __init__(self, drafts: Callable[[Entry], list[int]]) -> None:
        self.drafts = drafts
        self.asked: list[int] = []

    def propose(self, batch: Batch) -> DraftOutput:
        self.asked += [entry.max_drafts for entry in batch.entries if entry.sequence.num_output]
        return DraftOutput.pack([self.drafts(entry)[: entry.max_drafts] for entry in batch.entries], PointMass())


@pytest.mark.parametrize("right", [True, False])
def test_the_engine_asks_for_all_or_nothing(right: bool) -> None:
    follows = torch.arange(1, V + 1) % V
    table = torch.nn.functional.one_hot(follows, V).float().clamp(min=1e-30).log()
    spy = Spy(lambda entry: [(entry.sequence.tokens[-1] + i + (1 if right else 2)) % V for i in range(MOST)])
    engine, _ = dynamic_engine(table, spy, on_cpu)
    sample(engine, (FIRST,), 4, 400)
    late = spy.asked[len(spy.asked) // 2 :]
    assert np.mean([length == (MOST if right else 0) for length in late]) > 0.9


def test_joint_distribution_with_lengths_that_adapt() -> None:
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.5
    p = table.softmax(-1)
    q = torch.where(torch.arange(V)[:, None] % 2 == 0, 0.5 * p + 0.5 * (-0.7 * table).softmax(-1), p.roll(1, -1))
    drafter = TableDrafter(q, MOST)
    engine, _ = dynamic_engine(table, drafter, on_cpu, max_num_seqs=64)
    samples = sample(engine, (FIRST,), 20_000, LENGTH)
    assert worst_window(samples, table.double().softmax(-1).numpy(), FIRST) < 5
    stats = engine.take_stats()
    assert 0 < stats.num_accepted < stats.num_drafted
    assert len({*stats.drafted_per_position}) > 1, "lengths differed"


def test_greedy_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", vocab_size=64)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(3 + (7 * i * j) % 41 for j in range(4 + 9 * i)), params) for i in range(1, 7)]

    def texts(**drafter: Any) -> tuple[dict[str, list[int]], EngineCore]:
        engine = tiny_engine(folder, drafter=DrafterConfig(num_draft_tokens=MOST, ngram_min=1, **drafter))
        for request in requests:
            engine.add(request)
        return {key: answer.token_ids for key, answer in run(engine).items()}, engine

    plain, _ = texts(kind="none")
    adapted, engine = texts(kind="ngram", length="dynamic")
    assert adapted == plain
    assert engine.take_stats().num_accepted > 0
    assert_idle(engine)
    policy = engine.scheduler.draft_length
    assert isinstance(policy, DynamicLength)
    assert not policy._requests


def test_what_is_kept_of_a_request_goes_with_it(tmp_path: Path) -> None:
    engine = tiny_engine(write_tiny_model(tmp_path / "m", vocab_size=64), drafter=DYNAMIC)
    policy = engine.scheduler.draft_length
    assert isinstance(policy, DynamicLength)
    engine.add(Request("a", (5, 6, 7), SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    engine.step()
    assert list(policy._requests) == ["a"]
    engine.abort("a")
    assert not policy._requests
