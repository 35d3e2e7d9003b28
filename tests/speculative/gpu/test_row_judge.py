"""Judging rows from logits: Triton's kernels (in Triton's interpreter) against torch's operators, and enumeration."""

from collections.abc import Callable, Iterator

import pytest
import torch

from speculative.config import LogprobsMode
from speculative.gpu.row_judge import RowJudge
from tests.support.judged_rows import KINDS, VOCABULARY, filtered, padded, parts, scene
from tests.support.step_conformance import ARITHMETICS, FILTERS
from tests.support.triton_interpreter import needs_triton

pytestmark = needs_triton

MakeJudge = Callable[[LogprobsMode], RowJudge]


@pytest.fixture
def make_judge() -> Iterator[MakeJudge]:
    with ARITHMETICS["captured, triton"]() as arithmetic:
        yield arithmetic.make_judge


@pytest.fixture
def judge(make_judge: MakeJudge) -> RowJudge:
    return make_judge("raw_logprobs")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_alone_and_padded_is_judged_alike(make_judge: MakeJudge, kind: str) -> None:
    judge, given = make_judge("processed_logprobs"), filtered(scene(kind, (2, 0, 1)), *FILTERS)
    alone, whole = (parts(judge, one) for one in (given, padded(given)))
    for name, values in alone.items():
        found = whole[name][: len(values)]
        assert torch.equal(found, values) or name not in ("num_accepted", "token_ids", "drafts", "broken", "values")
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
    last = given.rows.offsets == found["num_accepted"][given.rows.entries]
    assert outside[last].any() and outside[~last].any()
    # Whatever a filter leaves out is unlikely: most tokens are within, and none of theirs is reported.
    processed = given.logits / given.rows.temperature
    emitted = torch.where(last, found["token_ids"][given.rows.entries], found["drafts"]).long()
    reached = given.rows.offsets <= found["num_accepted"][given.rows.entries]
    kept = torch_kept(processed, which).gather(1, emitted.clamp(min=0)[:, None])[:, 0]
    assert (outside == (reached & ~kept & ~given.rows.greedy)).all()


def torch_kept(processed: torch.Tensor, which: tuple[float, int, float]) -> torch.Tensor:
    """[R, V] bool, by definition."""
    min_p, top_k, top_p = which
    probs = torch.softmax(processed, dim=-1)
    likelier = probs[:, None, :] > probs[:, :, None]  # [R, V, V]: the second is likelier than the first
    kept = (probs >= min_p * probs.amax(dim=-1, keepdim=True)) & (likelier.sum(dim=-1) < (top_k or VOCABULARY))
    return kept & ((likelier * probs[:, None]).sum(dim=-1) < top_p)
