"""Drafts that end early: what is learned about a drafter's own probabilities, and that no distribution depends on the
end."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deploy.faults.toy import TableDrafter, engine_over
from speculative.config import DrafterConfig
from speculative.drafting.base import DraftOutput
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from speculative.scheduling.draft_length import DraftLength, DynamicLength
from speculative.scheduling.early_exit import EDGES, Confidence, EarlyExit
from speculative.state.batch import Batch, Entry, SequenceResult
from speculative.state.sequence import Sequence
from speculative.verification.draft_probs import Dense
from tests.support.engines import assert_idle, run, tiny_engine
from tests.support.markov_chain import sample, worst_window
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model

V, LENGTH, COUNT, FIRST = 16, 7, 6_000, 3
CLASSES = len(EDGES) + 1


def rule_of(survival: list[float], least: float) -> EarlyExit:
    """A rule that takes drawn and greedy drafts alike, and thinks nothing of the token after."""
    return EarlyExit(np.array([survival, survival]), np.ones((2, CLASSES)), least)


RISING = np.linspace(0.1, 1.0, CLASSES).tolist()
STEEP = [0.2, 0.4, 0.7, 0.85, *[0.95] * (CLASSES - 4)]  # for a small vocabulary, where a token of 0.3 is likely


# -- what is learned -----------------------------------------------------------------------------------------------


def test_what_a_probability_is_worth_is_counted() -> None:
    generator, confidence = random.Random(0), Confidence()
    for _ in range(20_000):
        probabilities = [generator.random() for _ in range(4)]
        accepted = next((i for i, one in enumerate(probabilities) if generator.random() >= one**2), 4)
        confidence.observe(False, probabilities, accepted)
    rule, untouched = confidence.rule(0.5), Confidence().rule(0.5)
    middles = (np.append(0, EDGES) + np.append(EDGES, 1)) / 2
    assert rule.survival[0] == pytest.approx(middles**2, abs=0.12)
    assert (np.diff(rule.survival[0][2:]) > 0).all()
    assert rule.following[0][3:] == pytest.approx([1 / 3] * (CLASSES - 3), abs=0.12), "independent of the one before"
    assert (rule.survival[1] == untouched.survival[1]).all(), "greedy drafts are counted on their own"


def test_a_draft_goes_on_while_the_next_is_likely_enough() -> None:
    rule = EarlyExit(np.full((2, CLASSES), 0.5), np.stack([np.full(CLASSES, 0.8), np.full(CLASSES, 0.2)]), 0.15)
    survived, goes_on = rule.after(1.0, 0.33, False)
    assert (survived, goes_on) == (0.5, True)
    assert rule.after(survived, 0.33, False) == (0.25, True)
    assert rule.after(0.25, 0.33, False) == (0.125, False)
    assert rule.after(1.0, 0.33, True) == (0.5, False), "the second row is of greedy requests"


# -- the policy ----------------------------------------------------------------------------------------------------

MOST = 4


class World:
    """A fake engine whose drafter knows how good its drafts are: a draft of probability c is accepted at that rate."""

    def __init__(self, policy: DynamicLength | None, length: int, num_sequences: int, seed: int) -> None:
        self.policy, self.length, self.random = policy, length, random.Random(seed)
        params = SamplingParams(max_tokens=10**6)
        self.sequences = [Sequence(Request(str(i), (1,), params), tokens=(1, 2)) for i in range(num_sequences)]
        for sequence in self.sequences:
            sequence.num_computed = 1
        self.num_tokens, self.elapsed_s, self.made = 0, 0.0, list[int]()

    def run(self, num_steps: int) -> "World":
        for _ in range(num_steps):
            if self.policy is not None:
                self.policy.plan(self.sequences)
            wanted = [self.policy.max_drafts(seq, MOST) if self.policy else self.length for seq in self.sequences]
            drawn = [self._round(sequence, count) for sequence, count in zip(self.sequences, wanted, strict=True)]
            counts = [one.num_drafted for one in drawn]
            seconds = 0.02 + 0.0005 * (len(drawn) + sum(counts)) + 0.0025 * max(counts)
            if self.policy is not None:
                entries = [
                    Entry(seq, 1, count, samples=True) for seq, count in zip(self.sequences, wanted, strict=True)
                ]
                self.policy.observe(entries, drawn, seconds * self.random.lognormvariate(0, 0.05))
            for sequence, one in zip(self.sequences, drawn, strict=True):
                sequence.advance(sequence.num_computed + len(one.token_ids), one.token_ids)
                self.num_tokens += len(one.token_ids)
            self.elapsed_s += seconds
            self.made += counts
        return self

    def _round(self, sequence: Sequence, wanted: int) -> SequenceResult:
        rule = self.policy.early_exit() if self.policy else None
        sure = self.random.random() < 0.5  # sure and unsure stretches: a mean rate says nothing about the next round
        probabilities, survived = list[float](), 1.0
        for _ in range(wanted):
            probabilities.append(0.95 if sure else 0.15)
            survived, goes_on = rule.after(survived, probabilities[-1], False) if rule else (1.0, True)
            if not goes_on:
                break
        accepted = next((i for i, c in enumerate(probabilities) if self.random.random() >= c), len(probabilities))
        if self.policy is not None and probabilities:
            self.policy.drafted(sequence, probabilities)
        return SequenceResult((5,) * (accepted + 1), len(probabilities), accepted)

    @property
    def speed(self) -> float:
        return self.num_tokens / self.elapsed_s


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_it_beats_every_fixed_length_where_the_drafter_knows(num_sequences: int) -> None:
    fixed = [World(None, length, num_sequences, seed=0).run(3000).speed for length in range(MOST + 1)]
    worlds = [World(DynamicLength(MOST), 0, num_sequences, seed).run(1500) for seed in range(3)]
    assert np.mean([world.speed for world in worlds]) > 1.02 * max(fixed)
    late = worlds[0].made[-300 * num_sequences :]
    assert min(np.mean(np.array(late) == 1), np.mean(np.array(late) == MOST)) > 0.3, "short when unsure, else long"


def test_a_probe_makes_all_drafts_that_it_plans() -> None:
    policy = DynamicLength(MOST)
    World(policy, 0, 1, seed=0).run(11)  # calibration: every length is tried whole, the longest first
    rule = policy.early_exit()
    assert rule is not None and rule.least == 0
    World(policy, 0, 1, seed=0).run(3)
    assert policy.early_exit() is None, "a single draft never ends early"
    World(policy, 0, 1, seed=0).run(100)
    rule = policy.early_exit()
    assert rule is not None and 0.05 < rule.least < 0.6, "a fraction of a token"


# -- no distribution depends on it -------------------------------------------------------------------------------------


class StoppingDrafter(TableDrafter):
    """Ends its drafts by a rule; `looks`: wrongly by the token at the end, which is left out when it is unlikely."""

    def __init__(self, q: Tensor, rule: EarlyExit, *, looks: bool) -> None:
        super().__init__(q, 4)
        self.rule, self.looks = rule, looks

    def propose(self, batch: Batch) -> DraftOutput:
        whole = super().propose(batch)
        assert isinstance(whole.draft_probs, Dense)
        drafts, rows, first = [], list[int](), 0
        for draft in whole.per_entry():
            distributions, count, survived = whole.draft_probs.probs[first : first + len(draft)], 0, 1.0
            for token, distribution in zip(draft, distributions, strict=True):
                survived, goes_on = self.rule.after(survived, float(distribution[token]), False)
                count += goes_on or not self.looks
                if not goes_on:
                    break
            drafts.append(draft[:count])
            rows += range(first, first + count)
            first += len(draft)
        return DraftOutput.pack(drafts, Dense(whole.draft_probs.probs[rows]))


@pytest.mark.parametrize(
    ("verifier", "looks"),
    [("token_wise", False), ("token_wise", True), ("block", False), ("block", True), ("coupled", False)],
)
def test_joint_distribution_with_drafts_that_end_early(verifier: str, looks: bool) -> None:
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.5
    p = table.softmax(-1)
    q = torch.where(torch.arange(V)[:, None] % 2 == 0, 0.5 * p + 0.5 * (-0.7 * table).softmax(-1), 0.3 * p + 0.7 / V)
    engine = engine_over(table, StoppingDrafter(q, rule_of(STEEP, 0.3), looks=looks), num_drafts=4, verifier=verifier)
    deviation = worst_window(sample(engine, (FIRST,), COUNT, LENGTH), table.double().softmax(-1).numpy(), FIRST)
    assert len({*engine.take_stats().drafted_per_position}) > 2, "lengths differed"
    assert deviation > 5 if looks else deviation < 5


class Ruled(DraftLength):
    """A policy with one rule, which keeps what it hears."""

    def __init__(self, rule: EarlyExit) -> None:
        self.rule, self.heard = rule, list[tuple[str, list[float]]]()

    def early_exit(self) -> EarlyExit:
        return self.rule

    def drafted(self, sequence: Sequence, probabilities: object) -> None:
        assert isinstance(probabilities, list)
        self.heard.append((sequence.request.request_id, probabilities))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_greedy_text_is_that_of_plain_decoding(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = write_tiny_model(tmp_path / "m", vocab_size=64, num_hidden_layers=4)
    if kind == "eagle3":
        write_tiny_head(tmp_path / "d", folder, draft_ids=torch.arange(3, 51, 2), own_embedding=True)
    drafts = tmp_path / "d" if kind == "eagle3" else folder

    def answers(drafter: DrafterConfig, policy: Ruled | None = None) -> tuple[dict[str, list[int]], EngineCore]:
        engine = tiny_engine(folder, drafter=drafter, dtype=dtype)
        if policy is not None:
            engine.drafter.length = policy  # type: ignore[attr-defined]
        for i in range(5):
            params = SamplingParams(
                max_tokens=30 + i, temperature=0 if i % 2 else 1, reproducible=True, ignore_eos=True
            )
            engine.add(Request(f"r{i}", tuple(3 + (7 * i * j) % 41 for j in range(4 + 3 * i)), params, seed=i))
        texts = {key: answer.token_ids for key, answer in run(engine).items()}
        assert_idle(engine)
        return texts, engine

    plain, _ = answers(DrafterConfig(kind="none"))
    policy = Ruled(rule_of(RISING, 0.3))
    stopped, engine = answers(DrafterConfig(kind=kind, model=str(drafts), num_draft_tokens=4), policy)  # type: ignore[arg-type]
    if dtype == "float32":
        assert stopped == plain
    lengths = [len(probabilities) for _, probabilities in policy.heard]
    assert sum(lengths) == engine.take_stats().num_drafted
    assert len({*lengths}) > 1
    assert all(0 < one <= 1 for _, probabilities in policy.heard for one in probabilities)
