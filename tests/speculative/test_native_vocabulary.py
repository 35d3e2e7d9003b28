"""Arithmetic over the vocabulary in our CPU kernels: what torch's operators say, wherever the numbers are sound."""

import pytest
import torch
from torch import Tensor

from speculative import sampling
from speculative.draft_law import Dense, DraftLaw, PointMass, SubVocabulary
from speculative.model.kernels import cpu_kernels
from speculative.outcome import emitted_at_rows
from speculative.request import SamplingParams
from speculative.sampling import SamplingRows, draw, process, target_probs
from speculative.selfcheck.invariants import broken_rows
from speculative.selfcheck.terms import Scope, take_terms
from speculative.verification import base
from speculative.verification.base import VerifyInput, draw_last
from speculative.verification.block import verify_block
from speculative.verification.token_wise import verify_token_wise

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler, or a CPU without AVX-512")

CPU = torch.device("cpu")
VOCAB, WIDTH = 1000, 75


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "kernels_for", lambda laws: None)
    monkeypatch.setattr(base, "kernels_for", lambda laws: None)


@pytest.mark.parametrize("size", [1, 15, 17, 256, 1000, 49152])
def test_laws(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, size, generator=generator(0)) * 8
    logits[2, ::2] = -torch.inf  # filtered out
    logits[2, -1] = 3.0
    logits[3, :] = 1.5  # ties: the first one
    params = [SamplingParams(temperature=value) for value in (1, 0, 0.3, 0, 1, 1.7)]
    rows = SamplingRows.build(params, size, CPU)
    ours = target_probs(process(logits, rows), rows)
    without_kernels(monkeypatch)
    theirs = target_probs(process(logits, rows), rows)
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
    sound = target_probs(logits, rows)
    for at in (0, 40, 99):
        spoilt = logits.clone()
        spoilt[1, at] = damage
        law = target_probs(spoilt, rows)
        assert law[1].isnan().all()
        assert torch.equal(law[[0, 2]], sound[[0, 2]])
    assert target_probs(torch.full((1, 100), -torch.inf), rows).isnan().all(), "no token is left"


def test_logits_nothing_is_done_to_are_not_copied_and_not_written_to() -> None:
    logits = torch.randn(2, 50, generator=generator(2))
    assert process(logits, SamplingRows.build([SamplingParams(), SamplingParams(temperature=0)], 50, CPU)) is logits
    before = logits.clone()
    filtered = process(logits, SamplingRows.build([SamplingParams(), SamplingParams(top_k=3)], 50, CPU))
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
def test_filters_are_torchs(size: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the tokens at a nucleus' edge, where the mass before them and top_p are the same to rounding."""
    logits = torch.randn(len(FILTERS), size, generator=generator(15)) * spread
    logits[:, ::7] = logits[:, :1].clone()  # ties
    logits[:, 5::11] = -torch.inf
    rows = SamplingRows.build(FILTERS, size, CPU)
    before = logits.clone()
    ours = process(logits, rows)
    assert torch.equal(logits, before)
    without_kernels(monkeypatch)
    theirs = process(logits, rows)
    differ = (ours > -torch.inf) != (theirs > -torch.inf)
    kept = torch.maximum(ours, theirs)
    assert torch.equal(kept[ours > -torch.inf], ours[ours > -torch.inf])
    law = torch.softmax(kept, dim=-1)
    assert (law * differ).sum(dim=-1).max() < 1e-4
    assert not differ[[4, 5, 6, 8, 10]].any(), "no nucleus, no rounding"


def test_a_nucleus_is_the_smallest_set_with_its_mass() -> None:
    law = torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.06, 0.04]])
    for top_p, kept in (
        (0.3, [1]),
        (0.41, [1, 2, 3]),
        (0.75, [1, 2, 3]),
        (0.85, [0, 1, 2, 3]),
        (0.97, [0, 1, 2, 3, 4, 5]),
    ):
        rows = SamplingRows.build([SamplingParams(top_p=top_p)], 6, CPU)
        found = process(law.log(), rows)[0]
        assert (found > -torch.inf).nonzero()[:, 0].tolist() == kept


def test_a_filtered_row_that_is_no_number_stays_none() -> None:
    logits = torch.randn(3, 100, generator=generator(16))
    logits[1, 40] = torch.nan
    rows = SamplingRows.build([SamplingParams(top_k=5, top_p=0.9, min_p=0.1)] * 3, 100, CPU)
    found = process(logits, rows)
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().sum(dim=-1).max() <= 5


@pytest.mark.parametrize("size", [1, 255, 256, 257, 3000])
def test_draws_are_torchs(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    laws = torch.rand(400, size, generator=generator(3)).pow(8)
    laws[:, torch.rand(size, generator=generator(4)) < 0.3] = 0
    laws[:, size // 2] = 0.5
    uniforms = torch.rand(400, generator=generator(5), dtype=torch.float64)
    ours = draw(laws, uniforms)
    without_kernels(monkeypatch)
    assert torch.equal(ours, draw(laws, uniforms))


def laws_of_drafts() -> dict[str, tuple[DraftLaw, Tensor]]:
    """A law of each kind for 20 packed drafts, and the drafts."""
    ids = torch.randperm(VOCAB, generator=generator(6))[:WIDTH].sort().values
    narrow = torch.softmax(torch.randn(20, WIDTH, generator=generator(7)) * 3, dim=-1)
    wide = torch.softmax(torch.randn(20, VOCAB, generator=generator(8)) * 3, dim=-1)
    columns = draw(narrow, torch.rand(20, generator=generator(9), dtype=torch.float64))
    drawn = draw(wide, torch.rand(20, generator=generator(10), dtype=torch.float64))
    nobody = Dense(torch.empty(0, VOCAB))
    return {
        "sub-vocabulary": (SubVocabulary(narrow, ids, columns), ids[columns]),
        "dense": (Dense(wide), drawn),
        "point mass": (PointMass(), drawn),
        "nothing drafted": (nobody, torch.full((20,), -1)),
    }


def a_step(kind: str) -> VerifyInput:
    """Ten entries of two drafts each; p is near q, so that some drafts survive."""
    law, drafts = laws_of_drafts()[kind]
    entries, offsets = torch.arange(10).repeat_interleave(3), torch.arange(3).repeat(10)
    judged = offsets < 2
    packed = torch.arange(30) - entries
    at_rows = torch.where(judged, drafts[packed.clamp(max=19)], -1)
    noise = torch.softmax(torch.randn(30, VOCAB, generator=generator(11)) * 3, dim=-1)
    probs = (noise + 2 * law.at(at_rows, packed, VOCAB)) / (1 + 2 * (at_rows >= 0).float()[:, None])
    counts = torch.full((10,), 0 if kind == "nothing drafted" else 2)
    return VerifyInput(
        probs=probs,
        law=law,
        drafts=at_rows,
        packed=packed,
        entries=entries,
        offsets=offsets,
        first_rows=torch.arange(10) * 3,
        counts=counts,
        coins=torch.rand(30, generator=generator(12), dtype=torch.float64),
        finals=torch.rand(30, generator=generator(13), dtype=torch.float64),
        seeds=torch.zeros(30, dtype=torch.int64),
        positions=torch.zeros(30, dtype=torch.int64),
    )


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
@pytest.mark.parametrize("with_shares", [False, True])
def test_the_last_token_is_drawn_from_the_residual(
    kind: str, with_shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = a_step(kind)
    rows = torch.arange(30)
    shares = torch.rand(30, generator=generator(14)) if with_shares else None
    ours = draw_last(step, rows, shares)
    without_kernels(monkeypatch)
    assert torch.equal(ours, draw_last(step, rows, shares))


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
@pytest.mark.parametrize("verify", [verify_token_wise, verify_block])
def test_verdicts_are_torchs(kind: str, verify: base.Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    step = a_step(kind)
    ours = verify(step)
    without_kernels(monkeypatch)
    theirs = verify(step)
    assert torch.equal(ours.num_accepted, theirs.num_accepted)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    torch.testing.assert_close(ours.expected_accepted, theirs.expected_accepted)
    if kind != "nothing drafted":
        assert 0 < int(ours.num_accepted.sum()) < 20


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
@pytest.mark.parametrize("damage", ["none", "p", "q"])
def test_terms_are_torchs(kind: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some entries that do not count, and of rows where p is no number, or is 0 at a draft, or q is no number."""
    step = a_step(kind)
    if damage == "p":
        step.probs[4, 17] = torch.nan
        if kind != "nothing drafted":
            step.probs[9, step.drafts[9]] = 0.0
    if damage == "q" and not isinstance(step.law, PointMass) and len(step.law.probs):
        step.law.probs[5, 3] = torch.nan
    verified = verify_token_wise(step)
    emitted = emitted_at_rows(verified, step)
    none = torch.zeros(10, dtype=torch.bool)
    judged = (step.drafts >= 0).nonzero()[:, 0]
    scope = Scope("token_wise", judged, torch.arange(10) % 4 > 0, none, any_coupled=False, all_coupled=False)
    ours = take_terms(step, verified, emitted, scope)
    without_kernels(monkeypatch)
    theirs = take_terms(step, verified, emitted, scope)
    sums = dict(zip(theirs.checks, theirs.sums, strict=True))
    if kind != "nothing drafted":  # there our kernels know fewer self-checks, all without a term
        assert set(ours.checks) == set(sums)
    for check, row in zip(ours.checks, ours.sums, strict=True):
        torch.testing.assert_close(row, sums.get(check, torch.zeros_like(row)), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours.achievable, theirs.achievable, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["sub-vocabulary", "dense", "point mass", "nothing drafted"])
def test_broken_rows_are_torchs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = a_step(kind)
    verified = verify_token_wise(step)
    emitted = emitted_at_rows(verified, step)
    highest, outside = torch.zeros(30), torch.arange(30) % 7 == 0
    highest[3], highest[6], highest[9], highest[2] = -torch.inf, torch.inf, torch.nan, torch.nan
    step.probs[12, emitted[12]], step.probs[27, emitted[27]] = 0.0, torch.nan
    if not isinstance(step.law, PointMass) and len(step.law.probs):
        step.law.probs[4] *= 1.1
        step.law.probs[6, 3] -= 1e-6
        step.law.probs[13, 2] = torch.nan
        column = step.law.columns[18] if isinstance(step.law, SubVocabulary) else step.drafts[27]
        step.law.probs[18, column] = 0.0
    ours = broken_rows(step, verified, emitted, highest, outside)
    without_kernels(monkeypatch)
    theirs = broken_rows(step, verified, emitted, highest, outside)
    assert ours.tolist() == theirs.tolist()
    assert len(set(ours.tolist())) >= (6 if kind in ("dense", "sub-vocabulary") else 4)


def test_where_p_leaves_nothing_beside_q_the_token_comes_from_p() -> None:
    step = a_step("dense")
    step.probs[:2] = step.law.probs[:2]
    certain = torch.zeros(VOCAB)
    certain[7] = 1.0
    step.probs[0], step.law.probs[0] = certain, certain
    assert draw_last(step, torch.tensor([0])).item() == 7


def test_expected_acceptance_is_the_overlap_over_the_whole_vocabulary() -> None:
    step = a_step("sub-vocabulary")
    found = verify_token_wise(step)
    overlap = torch.minimum(step.probs, step.q_at(torch.arange(30))).sum(dim=-1)
    torch.testing.assert_close(found.expected_accepted, step.sum_reached(overlap, found.num_accepted))
