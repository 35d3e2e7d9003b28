"""The distribution of whole continuations through the real `EngineCore.step`, over several rounds, with drafts out to
deceive.

Each test that passes has a twin that must not: the same run with one known fault put in.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.assembly import Assembly
from speculative.config import DrafterConfig
from speculative.drafting.base import Drafter, DraftOutput
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.sampling.draft_probs import Drawn, PointMass
from speculative.state.batch import Batch, Int64s
from tests.support.engines import markov_decoder, settings
from tests.support.markov_chain import sample, worst_window
from tests.support.tiny_heads import random_head
from tools.faults.mutants import MUTANTS
from tools.faults.toy import LikeliestDrafter, TableDrafter, engine_over

pytestmark = pytest.mark.slow

V, LENGTH, COUNT, FIRST = 16, 7, 12_000, 3
FEW = 4_000  # show most faults
FIVE_SIGMA = 5.0


def softmax(logits: Tensor) -> np.ndarray:
    return logits.double().softmax(-1).numpy()


@pytest.fixture(scope="module")
def table() -> Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.5


def deceiving(table: Tensor) -> Tensor:
    """A draft distribution that leans towards what the target does not want, and agrees with it elsewhere."""
    p = table.softmax(-1)
    wrong = (-0.7 * table).softmax(-1)
    return torch.where(torch.arange(V)[:, None] % 2 == 0, 0.5 * p + 0.5 * wrong, p.roll(1, -1) * 0.3 + 0.7 * p)


class VaryingDrafter(TableDrafter):
    """As its base, with draft lengths that depend on the prefix, 0 included."""

    def counts(self, batch: Batch) -> Int64s:
        return np.array([sum(entry.sequence.tokens) for entry in batch.entries]) % (super().counts(batch) + 1)


class DeterministicDrafter(Drafter):
    """Chooses drafts badly: a function of the prefix, with loops so that the same draft comes round after round."""

    def propose(self, batch: Batch) -> DraftOutput:
        return DraftOutput.pack(
            [[(e.sequence.tokens[-1] + i) % 5 for i in range(min(e.max_drafts, 3))] for e in batch.entries], PointMass()
        )


class RepeatingDrafter(VaryingDrafter):
    """Chooses its drafts for some entries of a batch, which its prefix decides, and samples those of the others."""

    def propose(self, batch: Batch) -> DraftOutput:
        sampled, chosen = super().propose(batch), DeterministicDrafter().propose(batch)
        repeated = {i for i, e in enumerate(batch.entries) if sum(e.sequence.tokens) % 3 == 0 and chosen.counts[i]}
        mine, theirs = sampled.per_entry(), chosen.per_entry()
        drafts = [theirs[index] if index in repeated else own for index, own in enumerate(mine)]
        owners = np.repeat(np.arange(len(mine)), sampled.counts)
        assert isinstance(sampled.draft_probs, Drawn)
        q = sampled.draft_probs.probs[torch.from_numpy(~np.isin(owners, list(repeated)))]
        return DraftOutput.pack(drafts, Drawn(q), frozenset(repeated))


DRAFTERS: dict[str, Callable[[Tensor], object]] = {
    "sampled": lambda table: VaryingDrafter(deceiving(table), 3),
    "sampled or repeated": lambda table: RepeatingDrafter(deceiving(table), 3),
    "deterministic": lambda table: DeterministicDrafter(),
    "likeliest": LikeliestDrafter,
    "ngram": lambda table: None,
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
def test_joint_distribution_over_several_rounds(table: Tensor, verifier: str, drafter: str) -> None:
    engine = engine_over(table, DRAFTERS[drafter](table), num_drafts=4, verifier=verifier)  # type: ignore[arg-type]
    samples = sample(engine, (FIRST,), COUNT, LENGTH)
    assert worst_window(samples, softmax(table), FIRST) < FIVE_SIGMA
    if drafter != "ngram":
        stats = engine.take_stats()
        assert stats.num_drafts > COUNT / 3  # rounds that speculated, and some of each outcome
        assert 0 < stats.num_accepted < stats.num_drafted
        assert abs(stats.expected_accepted - stats.num_accepted) < 5 * stats.num_drafted**0.5


@pytest.mark.parametrize("drafted", [(0, 2, 3, 5, 7), tuple(range(8))])
def test_joint_distribution_with_drafts_of_a_head(drafted: tuple[int, ...]) -> None:
    """The target is the chain in the weights of a real decoder, over whose hidden states a random head drafts."""
    table = 1.5 * torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    decoder = markov_decoder(table.softmax(-1), num_layers=3)
    head = Eagle3DraftModel(random_head(decoder, torch.tensor(drafted), embedding=decoder.embedding), "random")
    sizes = {"max_num_seqs": 256, "max_batched_tokens": 2048, "kv_cache_tokens": 8192, "prefix_caching": False}
    config = settings(drafter=DrafterConfig(num_draft_tokens=3), **sizes)
    engine = EngineCore(Assembly(Weights(decoder, "markov", head), config))
    samples = sample(engine, (FIRST, FIRST), 2_500, 5)
    assert worst_window(samples, softmax(table), FIRST) < FIVE_SIGMA
    stats = engine.take_stats()
    assert stats.num_drafts > 2_500 and 0 < stats.num_accepted < stats.num_drafted
    assert abs(stats.expected_accepted - stats.num_accepted) < 5 * stats.num_drafted**0.5


def test_joint_distribution_with_temperature_and_filters(table: Tensor) -> None:
    engine = engine_over(table, VaryingDrafter(deceiving(table), 3))
    samples = sample(engine, (FIRST,), COUNT, LENGTH, temperature=0.8, min_p=0.1, top_k=7, top_p=0.95)
    distribution = softmax(table / 0.8)
    least = 0.1 * distribution.max(-1, keepdims=True)
    assert (distribution >= least).sum(-1).min() < 7 < (distribution >= least).sum(-1).max(), "either filter decides"
    distribution[distribution < least] = 0
    order = np.argsort(-distribution, axis=-1, kind="stable")
    for row, ranks in zip(distribution, order, strict=True):
        row[ranks[7:]] = 0
        share = row[ranks] / row.sum()
        row[ranks[np.cumsum(share) - share >= 0.95]] = 0
    distribution /= distribution.sum(-1, keepdims=True)
    assert worst_window(samples, distribution, FIRST) < FIVE_SIGMA


# -- known faults, each of which must be seen ----------------------------------------------------------------------


FAULTS = {  # of the catalogue, with how many samples show each
    "F4 draft probabilities in another order": FEW,
    "F6 draft and residual share their noise": FEW,
    "F6 the coin is used again for the residual": COUNT,
    "F7 q before the filters, drafts sampled after them": FEW,
    "F8 argmax match at T > 0": FEW,
    "F8 the residual is drawn from p": FEW,
    "F12 the first draft is committed unverified": FEW,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_method_sees_the_fault(table: Tensor, fault: str) -> None:
    """Without the engine's own checks, which would end the requests."""
    engine = engine_over(table, TableDrafter(deceiving(table)), num_drafts=4, self_check_sample_rate=0.0)
    MUTANTS[fault].install(engine)
    samples = sample(engine, (FIRST,), FAULTS[fault], LENGTH)
    assert worst_window(samples, softmax(table), FIRST) > FIVE_SIGMA
