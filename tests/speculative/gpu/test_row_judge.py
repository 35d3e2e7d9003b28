"""Judging rows from logits: Triton's kernels (in Triton's interpreter) against torch's operators, and enumeration."""

from collections.abc import Callable

import pytest
import torch

from speculative.config import LogprobsMode
from speculative.gpu.row_judge import RowJudge
from speculative.sampling.rng import gumbel
from speculative.verification.draft_probs import mass_before
from tests.support.judged_rows import KINDS, VOCABULARY, filtered, padded, parts, scene
from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]

BLOCK = 64  # the last one is not full
NO_FILTER = (0.0, 0, 1.0)  # min_p, top_k, top_p
FILTERS = ((0.0, 5, 1.0), NO_FILTER, (0.0, 0, 0.7), (0.05, 20, 0.9))

MakeJudge = Callable[[LogprobsMode], RowJudge]


@pytest.fixture
def make_judge(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> MakeJudge:
    from speculative.gpu import triton_filters, triton_judge

    monkeypatch.setattr(triton_filters, "_TILE", 256)
    monkeypatch.setattr(triton_judge, "BLOCK", BLOCK)
    return triton_judge.TritonJudge


@pytest.fixture
def judge(make_judge: MakeJudge) -> RowJudge:
    return make_judge("raw_logprobs")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_alone_and_padded_is_judged_alike(make_judge: MakeJudge, kind: str) -> None:
    judge, given = make_judge("processed_logprobs"), filtered(scene(kind, (2, 0, 1)), *FILTERS)
    alone, whole = (parts(judge, one) for one in (given, padded(given)))
    for name, values in alone.items():
        found = whole[name][: len(values)]
        assert torch.equal(found, values) or name not in ("accepted", "tokens", "drafts", "broken", "values")
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("which", [(0.0, 3, 1.0), (0.0, 0, 0.4), (0.3, 0, 1.0)], ids=["top_k", "top_p", "min_p"])
def test_a_token_outside_its_filters_is_reported(
    judge: RowJudge, monkeypatch: pytest.MonkeyPatch, which: tuple[float, int, float]
) -> None:
    """Where the search for floors finds none: accepted drafts and last tokens alike."""
    from speculative.gpu import triton_judge

    given = filtered(scene("point mass", (4, 0, 0, 0)), which)
    given.rows.accept_uniforms[:], given.rows.temperature[:], given.rows.greedy[:] = 1e-9, 6.0, False
    given.rows.drafts[:2] = given.logits[:2].argsort(dim=-1)[:, 100]  # unlikely, and accepted if they may
    sound = parts(judge, given)
    assert not sound["broken"].any()
    monkeypatch.setattr(triton_judge, "triton_floors", lambda logits, *_: torch.full((len(logits),), -torch.inf))
    found = parts(judge, given)
    outside = found["broken"] == 6
    last = given.rows.offsets == found["accepted"][given.rows.entries]
    assert outside[last].any() and outside[~last].any()
    # Whatever a filter leaves out is unlikely: most tokens are within, and none of theirs is reported.
    processed = given.logits / given.rows.temperature
    emitted = torch.where(last, found["tokens"][given.rows.entries], found["drafts"]).long()
    reached = given.rows.offsets <= found["accepted"][given.rows.entries]
    kept = torch_kept(processed, which).gather(1, emitted.clamp(min=0)[:, None])[:, 0]
    assert (outside == (reached & ~kept & ~given.rows.greedy)).all()


def torch_kept(processed: torch.Tensor, which: tuple[float, int, float]) -> torch.Tensor:
    """[R, V] bool, by definition."""
    min_p, top_k, top_p = which
    probs = torch.softmax(processed, dim=-1)
    likelier = probs[:, None, :] > probs[:, :, None]  # [R, V, V]: the second is likelier than the first
    kept = (probs >= min_p * probs.amax(dim=-1, keepdim=True)) & (likelier.sum(dim=-1) < (top_k or VOCABULARY))
    return kept & ((likelier * probs[:, None]).sum(dim=-1) < top_p)


def test_mass_before_drafts() -> None:
    probs = torch.softmax(torch.randn((5, 4 * BLOCK + 3), generator=torch.Generator().manual_seed(0)), dim=-1)
    columns = torch.tensor([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 2])
    rows = torch.tensor([4, 0, 1, 1, 2, 3])
    expected = [float(probs[row, :column].double().sum()) for row, column in zip(rows, columns, strict=True)]
    assert mass_before(probs, rows, columns).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_kernels_noise_is_that_of_the_host() -> None:
    from tests.support.noise_kernel import store_noise

    seeds, positions = torch.tensor([0, 7, -5, 2**63 - 1, -(2**63)]), torch.tensor([0, 3, 100, 2**31 + 5, 2**32 - 1])
    found = torch.empty((5, 9), dtype=torch.float64)
    store_noise[(5,)](found, seeds, positions, WIDTH=9, BLOCK=16)
    torch.testing.assert_close(found, gumbel(seeds, positions, 9), rtol=1e-14, atol=1e-15)
