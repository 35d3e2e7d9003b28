"""Arithmetic over the vocabulary in our CPU kernels: what torch's operators say, wherever the numbers are sound."""

import pytest
import torch
from torch import Tensor

from speculative.request import SamplingParams
from speculative.sampling.probs import SamplingRows
from speculative.selfcheck.terms import TermScope
from speculative.verification.base import VerifyInput
from speculative.verification.draft_probs import Dense, DraftProbs, PointMass, SubVocabulary
from speculative.vocabulary.ops import TorchOps
from tests.support.vocabulary import CPU_OPS, needs_kernels

pytestmark = needs_kernels

CPU = torch.device("cpu")
VOCAB, WIDTH = 1000, 75
OURS, TORCHS = CPU_OPS, TorchOps()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [1, 15, 17, 256, 1000, 49152])
def test_distributions(size: int) -> None:
    logits = torch.randn(6, size, generator=generator(0)) * 8
    logits[2, ::2] = -torch.inf  # filtered out
    logits[2, -1] = 3.0
    logits[3, :] = 1.5  # ties: the first one
    params = [SamplingParams(temperature=value) for value in (1, 0, 0.3, 0, 1, 1.7)]
    rows = SamplingRows.build(params, size, CPU)
    ours = OURS.target_probs(OURS.process(logits, rows), rows)
    theirs = TORCHS.target_probs(TORCHS.process(logits, rows), rows)
    torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=1e-30)
    exact = torch.softmax((logits / rows.temperature)[[0, 2, 4, 5]].double(), dim=-1)
    torch.testing.assert_close(ours[[0, 2, 4, 5]].double(), exact, rtol=5e-6, atol=1e-30)
    assert (ours.double().sum(dim=-1) - 1).abs().max() < 1e-6
    assert torch.equal(ours[[1, 3]], theirs[[1, 3]])
    assert torch.equal(ours[2] > 0, theirs[2] > 0), "what is filtered out has no mass"


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_stays_none_and_harms_no_other(damage: float) -> None:
    logits = torch.randn(3, 100, generator=generator(1))
    rows = SamplingRows.build([SamplingParams()] * 3, 100, CPU)
    sound = OURS.target_probs(logits, rows)
    for at in (0, 40, 99):
        spoilt = logits.clone()
        spoilt[1, at] = damage
        distribution = OURS.target_probs(spoilt, rows)
        assert distribution[1].isnan().all()
        assert torch.equal(distribution[[0, 2]], sound[[0, 2]])
    assert OURS.target_probs(torch.full((1, 100), -torch.inf), rows).isnan().all(), "no token is left"


def test_logits_nothing_is_done_to_are_not_copied_and_not_written_to() -> None:
    logits = torch.randn(2, 50, generator=generator(2))
    rows = SamplingRows.build([SamplingParams(), SamplingParams(temperature=0)], 50, CPU)
    assert OURS.process(logits, rows) is logits
    before = logits.clone()
    filtered = OURS.process(logits, SamplingRows.build([SamplingParams(), SamplingParams(top_k=3)], 50, CPU))
    assert torch.equal(logits, before)
    assert int((filtered[1] > -torch.inf).sum()) == 3


FILTERS = (
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.05, temperature=0.7),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.999),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=700),
    SamplingParams(top_k=50, top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.01, top_k=30, top_p=0.7, temperature=1.5),
    SamplingParams(),
)


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 49152])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_filters_are_torchs(size: int, spread: float) -> None:
    """Up to the tokens at a nucleus' edge, where the mass before them and top_p are the same to rounding."""
    logits = torch.randn(len(FILTERS), size, generator=generator(15)) * spread
    logits[:, ::7] = logits[:, :1].clone()  # ties
    logits[:, 5::11] = -torch.inf
    rows = SamplingRows.build(FILTERS, size, CPU)
    before = logits.clone()
    ours = OURS.process(logits, rows)
    assert torch.equal(logits, before)
    theirs = TORCHS.process(logits, rows)
    differ = (ours > -torch.inf) != (theirs > -torch.inf)
    kept = torch.maximum(ours, theirs)
    assert torch.equal(kept[ours > -torch.inf], ours[ours > -torch.inf])
    distribution = torch.softmax(kept, dim=-1)
    assert (distribution * differ).sum(dim=-1).max() < 1e-4
    assert not differ[[4, 5, 6, 8, 10]].any(), "no nucleus, no rounding"


def test_a_nucleus_is_the_smallest_set_with_its_mass() -> None:
    distribution = torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.06, 0.04]])
    for top_p, kept in (
        (0.3, [1]),
        (0.41, [1, 2, 3]),
        (0.75, [1, 2, 3]),
        (0.85, [0, 1, 2, 3]),
        (0.97, [0, 1, 2, 3, 4, 5]),
    ):
        rows = SamplingRows.build([SamplingParams(top_p=top_p)], 6, CPU)
        found = OURS.process(distribution.log(), rows)[0]
        assert (found > -torch.inf).nonzero()[:, 0].tolist() == kept


def test_a_filtered_row_that_is_no_number_stays_none() -> None:
    logits = torch.randn(3, 100, generator=generator(16))
    logits[1, 40] = torch.nan
    rows = SamplingRows.build([SamplingParams(top_k=5, top_p=0.9, min_p=0.1)] * 3, 100, CPU)
    found = OURS.process(logits, rows)
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().sum(dim=-1).max() <= 5


@pytest.mark.parametrize("size", [1, 255, 256, 257, 3000])
def test_draws_are_torchs(size: int) -> None:
    distributions = torch.rand(400, size, generator=generator(3)).pow(8)
    distributions[:, torch.rand(size, generator=generator(4)) < 0.3] = 0
    distributions[:, size // 2] = 0.5
    uniforms = torch.rand(400, generator=generator(5), dtype=torch.float64)
    ours = OURS.draw(distributions, uniforms)
    assert torch.equal(ours, TORCHS.draw(distributions, uniforms))


def distributions_of_drafts() -> dict[str, tuple[DraftProbs, Tensor]]:
    """A distribution of each kind for 20 packed drafts, and the drafts."""
    ids = torch.randperm(VOCAB, generator=generator(6))[:WIDTH].sort().values
    narrow = torch.softmax(torch.randn(20, WIDTH, generator=generator(7)) * 3, dim=-1)
    wide = torch.softmax(torch.randn(20, VOCAB, generator=generator(8)) * 3, dim=-1)
    columns = OURS.draw(narrow, torch.rand(20, generator=generator(9), dtype=torch.float64))
    drawn = OURS.draw(wide, torch.rand(20, generator=generator(10), dtype=torch.float64))
    nobody = Dense(torch.empty(0, VOCAB))
    return {
        "sub-vocabulary": (SubVocabulary(narrow, ids, columns), ids[columns]),
        "dense": (Dense(wide), drawn),
        "point mass": (PointMass(), drawn),
        "nothing drafted": (nobody, torch.full((20,), -1)),
    }


def a_step(kind: str) -> VerifyInput:
    """Ten entries of two drafts each, or thirty of none; p is near q, so that some drafts survive."""
    distribution, drafts = distributions_of_drafts()[kind]
    num_drafts = 0 if kind == "nothing drafted" else 2
    num_entries = 30 // (num_drafts + 1)
    entries = torch.arange(num_entries).repeat_interleave(num_drafts + 1)
    offsets = torch.arange(num_drafts + 1).repeat(num_entries)
    judged = offsets < num_drafts
    packed = torch.arange(30) - entries
    at_rows = torch.where(judged, drafts[packed.clamp(max=19)], -1)
    noise = torch.softmax(torch.randn(30, VOCAB, generator=generator(11)) * 3, dim=-1)
    near = distribution.at(at_rows, packed, VOCAB) if num_drafts else torch.zeros_like(noise)
    probs = (noise + 2 * near) / (1 + 2 * (at_rows >= 0).float()[:, None])
    return VerifyInput(
        probs=probs,
        draft_probs=distribution,
        drafts=at_rows,
        packed=packed,
        entries=entries,
        offsets=offsets,
        first_rows=torch.arange(num_entries) * (num_drafts + 1),
        counts=torch.full((num_entries,), num_drafts),
        accept_uniforms=torch.rand(30, generator=generator(12), dtype=torch.float64),
        sample_uniforms=torch.rand(30, generator=generator(13), dtype=torch.float64),
        seeds=torch.zeros(30, dtype=torch.int64),
        positions=torch.zeros(30, dtype=torch.int64),
    )


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
@pytest.mark.parametrize("with_shares", [False, True])
def test_the_last_token_is_drawn_from_the_residual(kind: str, with_shares: bool) -> None:
    step = a_step(kind)
    rows = torch.arange(30)
    shares = torch.rand(30, generator=generator(14)) if with_shares else None
    ours = OURS.draw_last(step, rows, shares)
    assert torch.equal(ours, TORCHS.draw_last(step, rows, shares))


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
@pytest.mark.parametrize("verify", ["verify_token_wise", "verify_block"])
def test_verdicts_are_torchs(kind: str, verify: str) -> None:
    step = a_step(kind)
    ours = getattr(OURS, verify)(step)
    theirs = getattr(TORCHS, verify)(step)
    assert torch.equal(ours.num_accepted, theirs.num_accepted)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    torch.testing.assert_close(ours.expected_accepted, theirs.expected_accepted)
    if kind != "nothing drafted":
        assert 0 < int(ours.num_accepted.sum()) < 20


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
@pytest.mark.parametrize("damage", ["none", "p", "q"])
def test_terms_are_torchs(kind: str, damage: str) -> None:
    """Of some entries that do not count, and of rows where p is no number, or is 0 at a draft, or q is no number."""
    step = a_step(kind)
    if damage == "p":
        step.probs[4, 17] = torch.nan
        if kind != "nothing drafted":
            step.probs[9, step.drafts[9]] = 0.0
    if damage == "q" and not isinstance(step.draft_probs, PointMass) and len(step.draft_probs.probs):
        step.draft_probs.probs[5, 3] = torch.nan
    verified = OURS.verify_token_wise(step)
    emitted = OURS.emitted_at_rows(verified, step)
    num_entries = len(step.counts)
    scope = TermScope("token_wise", torch.arange(num_entries) % 4 > 0)
    ours = OURS.take_terms(step, verified, emitted, scope)
    theirs = TORCHS.take_terms(step, verified, emitted, scope)
    sums = dict(zip(theirs.checks, theirs.sums, strict=True))
    assert set(ours.checks) == set(sums)
    for check, row in zip(ours.checks, ours.sums, strict=True):
        torch.testing.assert_close(row, sums.get(check, torch.zeros_like(row)), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours.achievable, theirs.achievable, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
def test_broken_rows_are_torchs(kind: str) -> None:
    step = a_step(kind)
    verified = OURS.verify_token_wise(step)
    emitted = OURS.emitted_at_rows(verified, step)
    highest, outside = torch.zeros(30), torch.arange(30) % 7 == 0
    highest[3], highest[6], highest[9], highest[2] = -torch.inf, torch.inf, torch.nan, torch.nan
    step.probs[12, emitted[12]], step.probs[27, emitted[27]] = 0.0, torch.nan
    if not isinstance(step.draft_probs, PointMass) and len(step.draft_probs.probs):
        step.draft_probs.probs[4] *= 1.1
        step.draft_probs.probs[6, 3] -= 1e-6
        step.draft_probs.probs[13, 2] = torch.nan
        column = step.draft_probs.columns[18] if isinstance(step.draft_probs, SubVocabulary) else step.drafts[27]
        step.draft_probs.probs[18, column] = 0.0
    ours = OURS.broken_rows(step, verified, emitted, highest, outside)
    theirs = TORCHS.broken_rows(step, verified, emitted, highest, outside)
    assert ours.tolist() == theirs.tolist()
    assert len(set(ours.tolist())) >= (6 if kind in ("dense", "sub-vocabulary") else 4)


def test_where_p_leaves_nothing_beside_q_the_token_comes_from_p() -> None:
    step = a_step("dense")
    step.probs[:2] = step.draft_probs.probs[:2]
    certain = torch.zeros(VOCAB)
    certain[7] = 1.0
    step.probs[0], step.draft_probs.probs[0] = certain, certain
    assert OURS.draw_last(step, torch.tensor([0])).item() == 7


def test_expected_acceptance_is_the_overlap_over_the_whole_vocabulary() -> None:
    step = a_step("sub-vocabulary")
    found = OURS.verify_token_wise(step)
    overlap = torch.minimum(step.probs, step.q_at(torch.arange(30))).sum(dim=-1)
    torch.testing.assert_close(found.expected_accepted, step.sum_reached(overlap, found.num_accepted))


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "nothing drafted"])
def test_what_is_recorded_of_rounds_is_torchs(kind: str) -> None:
    step = a_step(kind)
    verified = TORCHS.verify_token_wise(step)
    if not isinstance(step.draft_probs, Dense | SubVocabulary):
        return  # without drafts nothing was sampled
    own, theirs = (ops.round_probs(step, verified, places=True) for ops in (OURS, TORCHS))
    judged = step.judged
    for found, expected, where in zip(own, theirs, (judged, slice(None), judged), strict=True):
        assert found is not None and expected is not None
        assert torch.allclose(found[where], expected[where].double(), atol=1e-6, rtol=0)
    assert OURS.round_probs(step, verified, places=False)[2] is None
    assert kind == "nothing drafted" or float(own[1].max()) > 0
