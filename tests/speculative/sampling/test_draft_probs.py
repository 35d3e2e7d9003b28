"""What a draft was drawn from, and that it was drawn from that."""

from collections.abc import Sequence as Sequences

import numpy as np
import pytest
import torch

from speculative.drafting.draft_sampler import DraftSampler
from speculative.request import Request, SamplingParams
from speculative.sampling.draft_probs import Drawn
from speculative.sampling.verify_rows import VerifyRows
from speculative.state.sequence import Sequence
from speculative.step.vocabulary_ops import VocabularyOps

IDS = torch.tensor([2, 5, 7, 11])
VOCABULARY = 16


def sequences(count: int, **params: object) -> list[Sequence]:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    return [Sequence(Request(str(n), (1, 2, 3), settings, seed=n * 7919)) for n in range(count)]


def draws(wanted: Sequences[Sequence], logits: torch.Tensor, **options: bool) -> tuple[np.ndarray, torch.Tensor]:
    settings = {"sampled": True, "all_coupled": False, **options}
    sampler = DraftSampler(IDS, VOCABULARY, VocabularyOps(), **settings)
    columns, probs = sampler.draw(logits.expand(len(wanted), -1), sampler.start_round(wanted, 2, logits.device), 1)
    return columns.numpy(), probs


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.7, "temperature": 1.5}])
def test_drafts_come_from_the_distribution_they_carry(params: dict[str, float], reproducible: bool) -> None:
    count = 20_000
    logits = torch.tensor([[0.3, 1.9, -1.0, 0.8]])
    columns, probs = draws(sequences(count, reproducible=reproducible, **params), logits)
    distribution = probs[0].double().numpy()
    assert distribution.sum() == pytest.approx(1, abs=1e-6)
    observed = np.bincount(columns, minlength=4) / count
    assert (observed[distribution == 0] == 0).all()
    assert np.abs(observed - distribution).max() < 5 * np.sqrt(0.25 / count)


def test_greedy_requests_and_greedy_drafters_take_the_likeliest() -> None:
    logits = torch.tensor([[0.3, 1.9, -1.0, 0.8]])
    for wanted, options in ((sequences(50, temperature=0), {}), (sequences(50), {"sampled": False})):
        columns, probs = draws(wanted, logits, **options)
        assert (columns == 1).all()
        assert torch.equal(probs, torch.eye(4)[[1] * 50])


def test_a_part_of_the_vocabulary_reads_like_the_whole() -> None:
    probs = torch.rand(5, 4).softmax(-1)
    columns = torch.tensor([3, 0, 1, 2, 0])
    dense = torch.zeros(5, VOCABULARY)
    dense[:, IDS] = probs
    part, whole = Drawn(probs, IDS, columns), Drawn(dense)
    # Two entries with 3 and 2 drafts; the last row of each judges none.
    drafts = torch.tensor([*IDS[columns[:3]].tolist(), -1, *IDS[columns[3:]].tolist(), -1])
    packed = torch.tensor([0, 1, 2, 3, 3, 4, 5])
    assert torch.equal(part.of_drafts(drafts, packed), whole.of_drafts(drafts, packed))
    assert torch.equal(part.at(drafts, packed, VOCABULARY), whole.at(drafts, packed, VOCABULARY))
    assert (part.of_drafts(drafts, packed)[[3, 6]] == 0).all()


def test_a_step_in_which_nobody_drafted_has_no_mass() -> None:
    nothing = torch.empty((0, 4))
    layout = np.array([0, 1]), np.array([0, 0])
    rows = VerifyRows.build(layout, np.array([0, 0]), [1, 2], [3, 4], np.array([-1, -1]))
    for distribution in (
        Drawn(nothing, IDS, torch.empty(0, dtype=torch.int64)),
        Drawn(torch.empty((0, VOCABULARY))),
    ):
        step = rows.input(torch.full((2, VOCABULARY), 1 / VOCABULARY), distribution)
        assert (step.q_of_drafts() == 0).all()
        assert step.q_at(torch.tensor([0, 1])).shape == (2, VOCABULARY)
        assert not step.q_at(torch.tensor([0, 1])).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_q_of_half_precision_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float32"):
        Drawn(torch.rand(2, 4).to(dtype))
    with pytest.raises(TypeError, match="float32"):
        Drawn(torch.rand(2, 4).to(dtype), IDS, torch.tensor([0, 1]))
