"""From logits to the law: against a naive float64 reference, and draws that follow it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from laws import assert_departs, assert_follows

from speculative.request import SamplingParams
from speculative.rng import Purpose, uniforms
from speculative.sampling import SamplingRows, draw, process, target_probs

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
)


def law_of(logits: torch.Tensor, params: list[SamplingParams] | tuple[SamplingParams, ...]) -> torch.Tensor:
    rows = SamplingRows.build(params, logits.shape[-1], CPU)
    return target_probs(process(logits, rows), rows)


def naive_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """The law of one row in float64; None where a filter's edge lies within rounding."""
    if params.greedy:
        return np.eye(len(logits))[logits.argmax()]
    scaled = logits.astype(np.float64) / params.temperature
    if params.top_k:
        scaled = np.where(scaled >= np.sort(scaled)[::-1][min(params.top_k, len(scaled)) - 1], scaled, -np.inf)
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    if params.top_p < 1:
        ranked = np.sort(law)[::-1]
        before = np.concatenate([[0], np.cumsum(ranked)[:-1]])
        if (np.abs(before[1:] - params.top_p) < 1e-5).any() and params.top_p < 1 - 1e-4:
            return None
        law = np.where(law >= ranked[before < params.top_p][-1], law, 0)
        law /= law.sum()
    return law


@pytest.mark.parametrize("vocab_size", [8, 50, 3000])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_law_is_the_naive_one_for_every_row_of_a_mixed_batch(vocab_size: int, spread: float) -> None:
    logits = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    params = [MIXED[row % len(MIXED)] for row in range(len(logits))]
    before = logits.clone()
    law = law_of(logits, params)
    assert torch.equal(logits, before), "logits are raw logprobs' source: they stay as they are"
    compared = 0
    for row, parameters in enumerate(params):
        expected = naive_law(logits[row].numpy(), parameters)
        if expected is not None:
            compared += 1
            assert np.abs(law[row].numpy() - expected).max() < 2e-6, parameters
    assert compared > 50


def test_whole_numbers_are_parameters_too() -> None:
    params = [SamplingParams(temperature=2, top_k=5, top_p=1, min_p=0), SamplingParams(temperature=1, min_p=1)]
    rows = SamplingRows.build(params, 8, torch.device("cpu"))
    assert rows.filters is not None
    assert {rows.temperature.dtype, rows.filters.top_p.dtype, rows.filters.log_min_p.dtype} == {torch.float32}
    logits = torch.arange(16.0).reshape(2, 8) / 10
    assert (target_probs(process(logits, rows), rows) > 0).sum(-1).tolist() == [5, 1]


def test_tokens_tied_with_the_last_one_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, 0.0]])
    assert law_of(logits, [SamplingParams(top_k=2)])[0, :4].gt(0).all()
    assert law_of(logits, [SamplingParams(top_k=2)])[0, 4:].eq(0).all()
    assert law_of(logits, [SamplingParams(top_p=0.5)])[0].gt(0).tolist() == [True] * 4 + [False] * 2
    assert law_of(logits, [SamplingParams(temperature=0)])[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert law_of(logits.flip(1), [SamplingParams(temperature=0)])[0].tolist() == [0, 0, 0, 0, 0, 1]


def test_a_neighbour_changes_nothing() -> None:
    logits = torch.randn(len(MIXED), 3000, generator=torch.Generator().manual_seed(2))
    together = law_of(logits, MIXED)
    for row, params in enumerate(MIXED):
        assert torch.equal(law_of(logits[row : row + 1], [params])[0], together[row])


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-40, 1e-38, 1e-20, 1e-7, 1e-6])
def test_a_temperature_near_zero_is_nearly_greedy_and_never_nan(temperature: float) -> None:
    logits = torch.tensor([[-30.0, 80.0, 79.0, -90.0], [5.0, 5.0, 4.0, -1.0]])
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_p=0.9, top_k=3),
    ):
        law = law_of(logits, [params, params])
        assert law[0].tolist() == [0, 1, 0, 0]
        assert law[1].tolist() == [0.5, 0.5, 0, 0], "an exact tie stays one"


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-9, 1e-3])
def test_a_tiny_nucleus_holds_the_best_token(top_p: float) -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(3))
    law = law_of(logits, [SamplingParams(top_p=top_p)] * 4)
    assert torch.equal(law.argmax(-1), logits.argmax(-1))
    assert law.amax(-1).tolist() == [1.0] * 4


def test_a_nucleus_larger_than_the_guess_is_found() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000:] = -20.0
    law = law_of(logits, [SamplingParams(top_p=0.9999)])
    assert law[0, :4000].gt(0).all(), "all are tied"
    assert law[0, 4000:].eq(0).all()
    spread = torch.linspace(0, 1, 5000)[None]
    expected = naive_law(spread[0].numpy(), SamplingParams(top_p=0.8))
    assert expected is not None
    assert abs(int(law_of(spread, [SamplingParams(top_p=0.8)]).gt(0).sum()) - int((expected > 0).sum())) <= 1


def test_a_row_without_a_nucleus_keeps_its_tail_beside_one_that_has_one() -> None:
    logits = torch.stack([torch.linspace(0, 1, 5000), torch.linspace(0, 1, 5000) * 100])
    law = law_of(logits, [SamplingParams(top_k=4000), SamplingParams(top_p=0.5)])
    assert law[0].gt(0).tolist() == [False] * 1000 + [True] * 4000
    assert int(law[1].gt(0).sum()) < 100


@pytest.mark.parametrize("uniform", [LEAST, 1e-12, 0.5, 1 - 1e-12, MOST])
def test_a_token_of_no_mass_is_never_drawn(uniform: float) -> None:
    laws = torch.tensor(
        [
            [0.0, 0.0, 1.0, 0.0, 0.0],
            [0.0, 0.3, 0.0, 0.7, 0.0],
            [0.0, 1e-45, 0.0, 1.0, 0.0],
            [0.0, 1.0, 0.0, 1e-45, 0.0],
            [0.0, 1e-45, 0.0, 0.0, 0.0],  # a residual need not be normalised
            [0.0, 1e-30, 1e-30, 0.0, 0.0],
        ]
    )
    drawn = draw(laws, torch.full((len(laws),), uniform, dtype=torch.float64))
    assert laws.gather(1, drawn[:, None]).gt(0).all()


def test_every_uniform_from_end_to_end_gives_a_possible_token() -> None:
    law = torch.rand(1, 3000, generator=torch.Generator().manual_seed(4))
    law[:, torch.randperm(3000, generator=torch.Generator().manual_seed(5))[:1500]] = 0
    law[:, [0, -1]] = 0
    ends = torch.cat([torch.arange(1, 200) * LEAST, 1 - torch.arange(1, 200) * LEAST]).double()
    drawn = draw(law.expand(len(ends), -1), ends)
    assert law[0, drawn].gt(0).all()
    assert drawn.min() == law[0].nonzero()[0, 0]
    assert drawn.max() == law[0].nonzero()[-1, 0]


def test_drawing_inverts_the_cumulative_law() -> None:
    law = torch.tensor([[0.125, 0.0, 0.5, 0.25, 0.125]])
    for uniform, token in ((0.0624, 0), (0.1249, 0), (0.1251, 2), (0.6249, 2), (0.6251, 3), (0.874, 3), (0.876, 4)):
        assert draw(law, torch.tensor([uniform], dtype=torch.float64)).item() == token
        assert draw(3 * law, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_a_row_of_nan_draws_some_token_of_the_vocabulary() -> None:
    """It is thrown away afterwards, but on the way there it is used as an index."""
    laws = torch.tensor([[torch.nan] * 4, [0.0, torch.nan, 1.0, 0.0], [0.25] * 4])
    drawn = draw(laws, torch.full((3,), 0.6, dtype=torch.float64))
    assert ((drawn >= 0) & (drawn < 4)).all()
    assert drawn[2] == 2


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(top_k=3)]
)
def test_draws_follow_the_law(params: SamplingParams) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(6)) * 1.5
    expected = naive_law(logits[0].numpy(), params)
    num_draws = 40_000
    rounds = np.arange(num_draws, dtype=np.uint64)
    purpose = np.full_like(rounds, Purpose.BONUS)
    uniform = torch.from_numpy(uniforms(np.full_like(rounds, 5), rounds, np.zeros_like(rounds), purpose))
    law = law_of(logits, [params])
    counts = np.bincount(draw(law.expand(num_draws, -1), uniform).numpy(), minlength=12)
    assert expected is not None
    assert_follows(counts, expected)
    other = naive_law(logits[0].numpy(), replace(params, temperature=params.temperature * 1.15))
    assert other is not None
    assert_departs(counts, other)
