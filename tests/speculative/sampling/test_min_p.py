"""min_p against a float64 reference, alone and with the filters that follow it; rows with hardly a token left."""

import math

import numpy as np
import pytest
import torch

from speculative.request import Request, SamplingParams
from speculative.sampling.probs import SamplingRows
from speculative.vocabulary.ops import VocabularyOps
from tests.support.distributions import assert_departs, assert_follows
from tests.support.engines import NO_DRAFTS, markov_engine, run
from tests.support.vocabulary import with_both_ops

CPU = torch.device("cpu")
MIXED = (
    SamplingParams(),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.5, temperature=2),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=1e-30),
    SamplingParams(min_p=0.05, top_k=4),
    SamplingParams(min_p=0.05, top_p=0.8),
    SamplingParams(min_p=0.02, top_p=0.9, top_k=7, temperature=0.7),
    SamplingParams(min_p=0.9, temperature=0),
    SamplingParams(top_p=0.9, top_k=7),
)


def distribution_of(ops: VocabularyOps, logits: torch.Tensor, params: tuple[SamplingParams, ...]) -> torch.Tensor:
    rows = SamplingRows.build(params, logits.shape[-1], CPU)
    processed = ops.process(logits, rows)
    assert processed.dtype == torch.float32
    return ops.target_probs(processed, rows)


def naive_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    if params.greedy:
        return np.eye(len(logits))[logits.argmax()]
    distribution = np.exp((logits - logits.max()) / params.temperature)
    distribution = np.where(distribution >= params.min_p * distribution.max(), distribution, 0)
    distribution = np.where(
        distribution >= np.sort(distribution)[::-1][(params.top_k or len(distribution)) - 1], distribution, 0
    )
    distribution /= distribution.sum()
    if params.top_p < 1:
        ranked = np.sort(distribution)[::-1]
        before = np.cumsum(ranked) - ranked
        distribution = np.where(distribution >= ranked[before < params.top_p][-1], distribution, 0)
    return distribution / distribution.sum()


@with_both_ops
@pytest.mark.parametrize("vocab_size", [8, 50, 3000])
def test_the_distribution_is_the_naive_one_for_every_row_of_a_mixed_batch(ops: VocabularyOps, vocab_size: int) -> None:
    logits = 2 * torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    before = logits.clone()
    params = tuple(MIXED[row % len(MIXED)] for row in range(60))
    distribution = distribution_of(ops, logits, params)
    assert torch.equal(logits, before)
    for row, asked in enumerate(params):
        assert (
            np.abs(distribution[row].numpy() - naive_distribution(logits[row].double().numpy(), asked)).max() < 2e-6
        ), (row, asked)
        assert torch.equal(distribution_of(ops, logits[row : row + 1], (asked,))[0], distribution[row]), (
            "a neighbour changes nothing"
        )


@with_both_ops
def test_ties_with_the_likeliest_stay_at_min_p_1(ops: VocabularyOps) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.999]])
    assert distribution_of(ops, logits, (SamplingParams(min_p=1.0),))[0].tolist() == [0, 0.5, 0.5, 0]


@with_both_ops
@pytest.mark.parametrize("params", MIXED)
def test_where_masks_leave_one_token_it_has_all_the_mass(ops: VocabularyOps, params: SamplingParams) -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 33] = -80.0
    assert distribution_of(ops, logits, (params,))[0].tolist() == [float(token == 33) for token in range(50)]


@with_both_ops
@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("fault", [-math.inf, math.nan])
def test_a_row_without_a_distribution_leaves_its_neighbours_alone(
    ops: VocabularyOps, params: SamplingParams, fault: float
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    alone = distribution_of(ops, logits[[0, 2]], (params, params))
    logits[1] = fault
    rows = SamplingRows.build([params] * 3, 50, CPU)
    processed = ops.process(logits, rows)
    assert torch.equal(ops.target_probs(processed, rows)[[0, 2]], alone)
    assert torch.isfinite(processed.amax(-1)).tolist() == [True, False, True], "the fault can still be seen"


def test_drafted_positions_obey_min_p() -> None:
    chain = torch.tensor([[0.5, 0.44, 0.06], [0.06, 0.5, 0.44], [0.44, 0.06, 0.5]])
    params = SamplingParams(max_tokens=3, min_p=0.5)
    filtered = torch.where(chain > 0.1, chain, 0)
    filtered /= filtered.sum(-1, keepdim=True)
    for drafter in ({}, {"drafter": NO_DRAFTS}):
        engine = markov_engine(chain, max_num_seqs=64, max_batched_tokens=1024, kv_cache_tokens=4096, **drafter)
        for seed in range(1500):
            engine.add(Request(str(seed), (0, 0, 0, 1, 1, 1, 0, 0), params, seed))
        counts = np.zeros((3, 3, 3))
        answers = run(engine)
        assert bool(drafter) != any(answer.num_accepted for answer in answers.values())
        for answer in answers.values():
            counts[tuple(answer.token_ids)] += 1
        for distribution, follows in ((filtered, assert_follows), (chain, assert_departs)):
            joint = distribution[0][:, None, None] * distribution[:, :, None] * distribution[None, :, :]
            follows(counts.ravel(), joint.numpy().ravel())
