"""How many tokens to draft: what is learned, what is chosen from it, and that no distribution depends on it."""

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Sequences

import numpy as np
import pytest
import torch

from speculative.draft_tree import rows_of_levels
from speculative.request import Request, SamplingParams
from speculative.scheduling.draft_length import DraftLength, DraftPlan, DynamicLength
from speculative.state.batch import Entry, SequenceResult
from speculative.state.sequence import Sequence
from speculative.stats import StepStats
from tests.support.markov_chain import sample, worst_window
from tools.faults.toy import TableDrafter, engine_over

MOST = 4
WIDTHS = (4, 2, 1, 1)


class Fixed(DraftLength):
    """Always the same length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, decoding: Sequences[Sequence]) -> DraftPlan:
        return DraftPlan({sequence.request.request_id: self.length for sequence in decoding})


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


def new_sequence(name: str, temperature: float = 1.0) -> Sequence:
    """A request that has its first token."""
    request = Request(name, (1, 2, 3), SamplingParams(max_tokens=10**6, temperature=temperature))
    sequence = Sequence(request, tokens=(1, 2, 3, 4))
    sequence.num_computed = 3
    return sequence


class World:
    """A fake engine: requests whose drafts are accepted at a known rate, steps that take a known time, give or take."""

    rows: Sequences[int] = range(MOST + 1)  # of 0, 1, ... drafts one behind the other

    def __init__(
        self, policy: DraftLength, seconds: Seconds, rates: Sequences[float], seed: int = 0, drift: float = 0.0
    ) -> None:
        self.policy, self.seconds, self.rates = policy, seconds, list(rates)
        self.random = random.Random(seed)
        self.drift, self.pace = drift, 0.0
        self.sequences = [new_sequence(str(i)) for i in range(len(rates))]
        self.lengths: list[list[int]] = []
        self.num_tokens, self.elapsed_s = 0, 0.0

    def step(self) -> None:
        self.plan = self.policy.choose(self.sequences)
        lengths = [self.plan.most(sequence.request.request_id, MOST) for sequence in self.sequences]
        drawn = [self._verify(*each) for each in zip(lengths, self.rates, strict=True)]
        step_s = self.seconds(len(lengths), sum(self.rows[length] for length in lengths), max(lengths))
        if self.drift:
            self.pace = 0.99 * self.pace + self.random.gauss(0, math.sqrt(1 - 0.99**2) * self.drift)
        measured = step_s * self.random.lognormvariate(self.pace, 0.05)
        measured *= 20 if self.random.random() < 0.005 else 1
        planned = zip(self.sequences, lengths, strict=True)
        entries = [Entry(sequence, 1, length, samples=True) for sequence, length in planned]
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

    def _verify(self, length: int, rate: float) -> SequenceResult:
        accepted = next((n for n in range(length) if self.random.random() >= rate), length)
        return SequenceResult((5,) * (accepted + 1), length, accepted)

    @property
    def speed(self) -> float:
        return self.num_tokens / self.elapsed_s

    def share(self, length: int, sequence: int = 0, last: int = 300) -> float:
        """How often a sequence got this length lately."""
        return float(np.mean([lengths[sequence] == length for lengths in self.lengths[-last:]]))


class TreeWorld(World):
    """The same with trees, of which one candidate for a position is right at a known rate."""

    rows = rows_of_levels(WIDTHS)


# -- what is chosen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_it_is_as_fast_as_the_best_static_length(num_sequences: int, rate: float) -> None:
    rates = [rate] * num_sequences
    static = [World(Fixed(length), on_cpu, rates).run(1200).speed for length in range(MOST + 1)]
    dynamic = [World(DynamicLength(MOST), on_cpu, rates, seed=seed).run(1200).speed for seed in range(4)]
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
    stats = StepStats()
    world = World(DynamicLength(MOST, stats=stats), seconds, [rate] * num_sequences).run(10)
    assert stats.speculated_s == 0, "what a step costs is not known yet"
    world.run(290)
    stats.take()
    num_tokens, elapsed_s = world.num_tokens, world.elapsed_s
    world.run(1200)
    spent_s, plain_s = stats.speculated_s, stats.speculated_plain_s
    num_tokens, elapsed_s = world.num_tokens - num_tokens, world.elapsed_s - elapsed_s
    saved = 1 - elapsed_s / (num_tokens / num_sequences * seconds(num_sequences, 0, 0))
    assert saved > 0.2
    assert 1 - spent_s / plain_s == pytest.approx(saved, abs=0.06)


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


def test_a_request_whose_drafts_are_accepted_gets_more_of_them() -> None:
    worlds = [World(DynamicLength(MOST), by_rows, [0.95, 0.05, 0.05, 0.05], seed=seed) for seed in range(3)]
    given = np.mean([world.run(900).lengths[-300:] for world in worlds], axis=(0, 1))
    assert given[0] > 3
    assert given[1:].max() < 1


@pytest.mark.parametrize("seconds", [on_cpu, by_rows, free_rows, dear_rows])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
def test_trees_have_as_many_levels_as_pay(seconds: Seconds, rate: float) -> None:
    fixed = [TreeWorld(Fixed(length), seconds, [rate]).run(2000).speed for length in range(MOST + 1)]
    worlds = [TreeWorld(DynamicLength(MOST, rows=TreeWorld.rows), seconds, [rate], seed=seed) for seed in range(4)]
    for world in worlds:
        world.run(100)
        world.num_tokens, world.elapsed_s = 0, 0.0  # of a warm-up: trees cost much where rows do
    assert np.mean([world.run(1200).speed for world in worlds]) > 0.95 * max(fixed)


def test_what_drawn_drafts_are_worth_is_not_taken_for_greedy_ones() -> None:
    policy = DynamicLength(MOST)
    world = World(policy, on_cpu, [0.95, 0.05])
    world.sequences[0] = new_sequence("greedy", temperature=0.0)
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
    assert {0, 1, 2} <= {max(lengths) for world in worlds for lengths in world.lengths[-600:]} <= {0, 1, 2, 3}


def test_it_notices_when_drafts_begin_to_be_accepted_and_when_they_cease() -> None:
    worlds = [World(DynamicLength(MOST), on_cpu, [0.0], seed=seed) for seed in range(4)]
    for rate, num_steps, length, least in ((0.0, 400, 0, 0.95), (1.0, 2500, MOST, 0.9), (0.0, 1200, 0, 0.9)):
        for world in worlds:
            world.rates = [rate]
        assert np.mean([world.run(num_steps).share(length, last=100) for world in worlds]) > least


@pytest.mark.parametrize(("rate", "least"), [(0.15, 0.965), (0.4, 0.965), (0.8, 1.0)])
def test_short_requests_lose_next_to_nothing_where_drafting_hardly_pays(rate: float, least: float) -> None:
    """64 answers of 96 tokens, eight at once."""

    def seconds(num_sequences: int, num_drafts: int, longest: int) -> float:
        return 0.008 + 0.004 * num_sequences + 0.0031 * num_drafts + 0.0005 * longest

    def speed(policy: DraftLength, seed: int) -> float:
        world, num_answers = World(policy, seconds, [rate] * 8, seed=seed), 0
        while num_answers < 64:
            world.step()
            for index, sequence in enumerate(world.sequences):
                if sequence.num_output >= 96:
                    num_answers += 1
                    policy.forget(sequence.request.request_id)
                    world.sequences[index] = new_sequence(f"later {num_answers}")
        return world.speed

    def warmed(seed: int) -> DynamicLength:
        policy = DynamicLength(MOST)
        policy.is_trial = True
        World(policy, seconds, [0.3] * 8, seed=seed).run(30)
        policy.restart()
        return policy

    assert min(speed(warmed(seed), seed) / speed(Fixed(0), seed) for seed in range(4)) > least


# -- in the engine -------------------------------------------------------------------------------------------------

V, LENGTH, FIRST = 16, 7, 3


def test_joint_distribution_with_lengths_that_adapt() -> None:
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.5
    p = table.softmax(-1)
    q = torch.where(torch.arange(V)[:, None] % 2 == 0, 0.5 * p + 0.5 * (-0.7 * table).softmax(-1), p.roll(1, -1))
    engine = engine_over(table, TableDrafter(q, MOST), num_drafts=MOST, max_num_seqs=64)
    policy = engine.scheduler.draft_length = DynamicLength(MOST)
    observe = policy.observe

    def timed(entries: Sequences[Entry], results: Sequences[SequenceResult], step_s: float) -> None:
        assert 0 < step_s < 60
        counts = [one.num_drafted for one in results]
        observe(entries, results, on_cpu(len(entries), sum(counts), max(counts, default=0)))

    policy.observe = timed  # type: ignore[method-assign]
    samples = sample(engine, (FIRST,), 20_000, LENGTH)
    assert worst_window(samples, table.double().softmax(-1).numpy(), FIRST) < 5
    stats = engine.take_stats()
    assert 0 < stats.num_accepted < stats.num_drafted
    assert len({*stats.drafted_per_position}) > 1, "lengths differed"
