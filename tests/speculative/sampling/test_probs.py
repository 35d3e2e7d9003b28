"""From logits to the distribution, against a naive float64 reference, and to the token that a uniform draws."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from speculative.request import SamplingParams
from speculative.sampling.probs import SamplingRows
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.vocabulary import with_both_ops

pytestmark = with_both_ops

CPU = torch.device("cpu")
LEAST, MOST = 2.0**-53, 1 - 2.0**-53  # the uniforms nearest to 0 and 1
MIXED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2, top_k=5),
    SamplingParams(temperature=1, top_k=1),
    SamplingParams(temperature=1, top_k=10_000),
    SamplingParams(temperature=1, top_p=0.7),
    SamplingParams(temperature=0.7, top_p=0.95, top_k=20),
    SamplingParams(temperature=1, top_p=1e-6),
    SamplingParams(temperature=1.5, top_p=0.999),
    SamplingParams(temperature=0, top_k=3, top_p=0.5),
    SamplingParams(temperature=1, top_k=3, top_p=0.999_999),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.5, temperature=2),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=1e-30),
    SamplingParams(min_p=0.05, top_k=4),
    SamplingParams(min_p=0.02, top_p=0.9, top_k=7, temperature=0.7),
    SamplingParams(min_p=0.9, temperature=0),
)


def distribution_of(ops: VocabularyOps, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    rows = SamplingRows.build(params, logits.shape[-1], CPU)
    return ops.target_probs(ops.process(logits, rows), rows)


def naive_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """The distribution of one row in float64; None where a filter's edge lies within rounding."""
    if params.greedy:
        return np.eye(len(logits))[logits.argmax()]
    scaled = logits.astype(np.float64) / params.temperature
    if params.min_p:
        scaled = np.where(scaled >= scaled.max() + np.log(params.min_p), scaled, -np.inf)
    if params.top_k:
        scaled = np.where(scaled >= np.sort(scaled)[::-1][min(params.top_k, len(scaled)) - 1], scaled, -np.inf)
    distribution = np.exp(scaled - scaled.max())
    distribution /= distribution.sum()
    if params.top_p < 1:
        ranked = np.sort(distribution)[::-1]
        before = np.concatenate([[0], np.cumsum(ranked)[:-1]])
        if (np.abs(before[1:] - params.top_p) < 1e-5).any() and params.top_p < 1 - 1e-4:
            return None
        distribution = np.where(distribution >= ranked[before < params.top_p][-1], distribution, 0)
        distribution /= distribution.sum()
    return distribution


@pytest.mark.parametrize("vocab_size", [8, 50, 3000])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_distribution_is_the_naive_one_for_every_row_of_a_mixed_batch(
    ops: VocabularyOps, vocab_size: int, spread: float
) -> None:
    logits = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    params = [MIXED[row % len(MIXED)] for row in range(len(logits))]
    before = logits.clone()
    distribution = distribution_of(ops, logits, params)
    assert torch.equal(logits, before), "logits are raw logprobs' source: they stay as they are"
    compared = 0
    for row, parameters in enumerate(params):
        expected = naive_distribution(logits[row].numpy(), parameters)
        if expected is not None:
            compared += 1
            assert np.abs(distribution[row].numpy() - expected).max() < 2e-6, parameters
    assert compared > 50
    for row, parameters in enumerate(params[: len(MIXED)]):
        alone = distribution_of(ops, logits[row : row + 1], [parameters])[0]
        assert torch.equal(alone, distribution[row]), "a neighbour changes nothing"


def test_logits_that_nothing_is_done_to_are_not_copied(ops: VocabularyOps) -> None:
    logits = torch.randn(2, 50)
    assert ops.process(logits, SamplingRows.build([SamplingParams(), SamplingParams(temperature=0)], 50, CPU)) is logits


def test_whole_numbers_are_parameters_too(ops: VocabularyOps) -> None:
    params = [SamplingParams(temperature=2, top_k=5, top_p=1, min_p=0), SamplingParams(temperature=1, min_p=1)]
    rows = SamplingRows.build(params, 8, torch.device("cpu"))
    assert rows.filters is not None
    assert {rows.temperature.dtype, rows.filters.top_p.dtype, rows.filters.log_min_p.dtype} == {torch.float32}
    logits = torch.arange(16.0).reshape(2, 8) / 10
    assert (ops.target_probs(ops.process(logits, rows), rows) > 0).sum(-1).tolist() == [5, 1]


def test_tokens_tied_with_the_last_one_stay(ops: VocabularyOps) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, 0.0]])
    assert distribution_of(ops, logits, [SamplingParams(top_k=2)])[0, :4].gt(0).all()
    assert distribution_of(ops, logits, [SamplingParams(top_k=2)])[0, 4:].eq(0).all()
    assert distribution_of(ops, logits, [SamplingParams(top_p=0.5)])[0].gt(0).tolist() == [True] * 4 + [False] * 2
    assert distribution_of(ops, logits, [SamplingParams(temperature=0)])[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert distribution_of(ops, logits.flip(1), [SamplingParams(temperature=0)])[0].tolist() == [0, 0, 0, 0, 0, 1]
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.999]])
    assert distribution_of(ops, logits, [SamplingParams(min_p=1.0)])[0].tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-40, 1e-38, 1e-20, 1e-7, 1e-6])
def test_a_temperature_near_zero_is_nearly_greedy_and_never_nan(ops: VocabularyOps, temperature: float) -> None:
    logits = torch.tensor([[-30.0, 80.0, 79.0, -90.0], [5.0, 5.0, 4.0, -1.0]])
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_p=0.9, top_k=3),
    ):
        distribution = distribution_of(ops, logits, [params, params])
        assert distribution[0].tolist() == [0, 1, 0, 0]
        assert distribution[1].tolist() == [0.5, 0.5, 0, 0], "an exact tie stays one"


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-9, 1e-3])
def test_a_tiny_nucleus_holds_the_best_token(ops: VocabularyOps, top_p: float) -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(3))
    distribution = distribution_of(ops, logits, [SamplingParams(top_p=top_p)] * 4)
    assert torch.equal(distribution.argmax(-1), logits.argmax(-1))
    assert distribution.amax(-1).tolist() == [1.0] * 4


def test_a_nucleus_larger_than_the_guess_is_found(ops: VocabularyOps) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000:] = -20.0
    distribution = distribution_of(ops, logits, [SamplingParams(top_p=0.9999)])
    assert distribution[0, :4000].gt(0).all(), "all are tied"
    assert distribution[0, 4000:].eq(0).all()
    spread = torch.linspace(0, 1, 5000)[None]
    expected = naive_distribution(spread[0].numpy(), SamplingParams(top_p=0.8))
    assert expected is not None
    assert (
        abs(int(distribution_of(ops, spread, [SamplingParams(top_p=0.8)]).gt(0).sum()) - int((expected > 0).sum())) <= 1
    )


def test_a_row_without_a_nucleus_keeps_its_tail_beside_one_that_has_one(ops: VocabularyOps) -> None:
    logits = torch.stack([torch.linspace(0, 1, 5000), torch.linspace(0, 1, 5000) * 100])
    distribution = distribution_of(ops, logits, [SamplingParams(top_k=4000), SamplingParams(top_p=0.5)])
    assert distribution[0].gt(0).tolist() == [False] * 1000 + [True] * 4000
    assert int(distribution[1].gt(0).sum()) < 100


@pytest.mark.parametrize("uniform", [LEAST, 1e-12, 0.5, 1 - 1e-12, MOST])
def test_a_token_of_no_mass_is_never_drawn(ops: VocabularyOps, uniform: float) -> None:
    distributions = torch.tensor(
        [
            [0.0, 0.0, 1.0, 0.0, 0.0],
            [0.0, 0.3, 0.0, 0.7, 0.0],
            [0.0, 1e-45, 0.0, 1.0, 0.0],
            [0.0, 1.0, 0.0, 1e-45, 0.0],
            [0.0, 1e-45, 0.0, 0.0, 0.0],  # a residual need not be normalised
            [0.0, 1e-30, 1e-30, 0.0, 0.0],
        ]
    )
    drawn = ops.draw(distributions, torch.full((len(distributions),), uniform, dtype=torch.float64))
    assert distributions.gather(1, drawn[:, None]).gt(0).all()


def test_every_uniform_from_end_to_end_gives_a_possible_token(ops: VocabularyOps) -> None:
    distribution = torch.rand(1, 3000, generator=torch.Generator().manual_seed(4))
    distribution[:, torch.randperm(3000, generator=torch.Generator().manual_seed(5))[:1500]] = 0
    distribution[:, [0, -1]] = 0
    ends = torch.cat([torch.arange(1, 200) * LEAST, 1 - torch.arange(1, 200) * LEAST]).double()
    drawn = ops.draw(distribution.expand(len(ends), -1), ends)
    assert distribution[0, drawn].gt(0).all()
    assert drawn.min() == distribution[0].nonzero()[0, 0]
    assert drawn.max() == distribution[0].nonzero()[-1, 0]


def test_drawing_inverts_the_cumulative_distribution(ops: VocabularyOps) -> None:
    distribution = torch.tensor([[0.125, 0.0, 0.5, 0.25, 0.125]])
    for uniform, token in ((0.0624, 0), (0.1249, 0), (0.1251, 2), (0.6249, 2), (0.6251, 3), (0.874, 3), (0.876, 4)):
        assert ops.draw(distribution, torch.tensor([uniform], dtype=torch.float64)).item() == token
        assert ops.draw(3 * distribution, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_a_row_of_nan_draws_some_token_of_the_vocabulary(ops: VocabularyOps) -> None:
    """It is thrown away afterwards, but on the way there it is used as an index."""
    distributions = torch.tensor([[torch.nan] * 4, [0.0, torch.nan, 1.0, 0.0], [0.25] * 4])
    drawn = ops.draw(distributions, torch.full((3,), 0.6, dtype=torch.float64))
    assert ((drawn >= 0) & (drawn < 4)).all()
    assert drawn[2] == 2


@pytest.mark.parametrize("params", MIXED)
def test_where_masks_leave_one_token_it_has_all_the_mass(ops: VocabularyOps, params: SamplingParams) -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 33] = -80.0
    assert distribution_of(ops, logits, [params])[0].tolist() == [float(token == 33) for token in range(50)]


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("fault", [-torch.inf, torch.inf, torch.nan])
def test_a_row_without_a_distribution_leaves_its_neighbours_alone(
    ops: VocabularyOps, params: SamplingParams, fault: float
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    alone = distribution_of(ops, logits[[0, 2]], [params, params])
    logits[1] = fault
    rows = SamplingRows.build([params] * 3, 50, CPU)
    processed = ops.process(logits, rows)
    assert torch.equal(ops.target_probs(processed, rows)[[0, 2]], alone)
    assert torch.isfinite(processed.amax(-1)).tolist() == [True, False, True], "the fault can still be seen"
